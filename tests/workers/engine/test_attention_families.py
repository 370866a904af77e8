"""The engine's log-probabilities and gradient against transformers' eager attention, which is each family's reference.

Each row is alone in the reference, so padding and packing show too. Tolerances: attention in fp32 sums a few dozen
terms in another order, and four layers with large weights amplify that to some 1e-5; each option that is dropped
changes log-probabilities by more than 0.05 (asserted).
"""

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.ranks import spawn_ranks
from tests.workers.engine import attention_cases, cases
from tests.workers.engine.attention_cases import CAPPED, FAMILIES, WITHOUT
from verl.base_config import ConfigError
from verl.models.transformers import attention_choice
from verl.workers.config import RolloutConfig

SINKS = ("gpt_oss", "granite_swa", "mimo_v2_flash")
DRAWS = "phimoe"  # its experts in training


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family, changes in FAMILIES.items():
        attention_cases.write(folder / family, family, **changes)
    return folder


@cache
def wanted(folder: Path) -> tuple[torch.Tensor, float]:
    return attention_cases.wanted(folder)


def assert_equal(found: tuple[torch.Tensor, float], folder: Path, atol: float = 2e-4) -> None:
    expected, norm = wanted(folder)
    torch.testing.assert_close(found[0], expected, atol=atol, rtol=0)
    if not folder.name.startswith(DRAWS):
        assert found[1] == pytest.approx(norm, rel=10 * atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows(root: Path, family: str) -> None:
    assert_equal(attention_cases.found(cases.build(root / family, {"use_remove_padding": False})), root / family)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "bloom"])
def test_packed_rows(root: Path, family: str) -> None:
    assert_equal(attention_cases.found(cases.build(root / family)), root / family)


@pytest.mark.full
def test_ranks_that_share_heads(root: Path) -> None:
    spawn_ranks(attention_cases.ulysses_rank, (root, [family for family in FAMILIES if family != "bloom"]))
    for rank in range(2):
        for family, found in torch.load(root / f"ulysses_{rank}.pt").items():
            assert_equal(found, root / family)


def test_shared_prefixes_under_a_cap(tmp_path: Path) -> None:
    full = CAPPED | {"layer_types": ["full_attention"] * 4}
    attention_cases.write(tmp_path, "gemma2", **full)
    assert_equal(attention_cases.found(cases.build(tmp_path, {"use_prefix_sharing": True})), tmp_path)


@pytest.mark.parametrize("family", [*WITHOUT, *SINKS])
def test_the_options_matter(root: Path, family: str, tmp_path: Path) -> None:
    """A comparison of models that do not use their option would prove nothing."""
    if family in SINKS:
        engine = cases.build(root / family)
        for name, parameter in engine.module.named_parameters():
            if "sink" in name:
                parameter.data.fill_(-1e4)
        without = attention_cases.found(engine)[0]
    else:
        without = attention_cases.wanted(root / family, **WITHOUT[family])[0]
    assert (without - wanted(root / family)[0]).abs().max() > 0.05


@pytest.mark.parametrize("packed", [True, False])
def test_a_critic_under_a_cap(root: Path, packed: bool) -> None:
    from transformers import AutoModelForTokenClassification

    engine = cases.build(root / "gemma2", {"use_remove_padding": packed}, kind="value_model")
    model = AutoModelForTokenClassification.from_pretrained(root / "gemma2", num_labels=1, attn_implementation="eager")
    model.load_state_dict(cases.export(engine), strict=False)
    with engine.eval_mode(), torch.no_grad():
        found = engine.infer_batch(attention_cases.batch())["values"]
        alone = [model.eval()(input_ids=row[None]).logits[0, :, 0] for row in attention_cases.rows()]
    for at, values in enumerate(alone):
        first = 4 + 2 * at  # a value is read where its token is predicted
        torch.testing.assert_close(found[at, : len(values) - first], values[first - 1 : -1], atol=2e-4, rtol=0)


def test_one_notice_of_the_memory(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    attention_choice._give_notice.cache_clear()
    for _ in range(2):
        cases.build(root / "gemma2", {"use_remove_padding": False})
    (record,) = [each for each in caplog.records if each.name == attention_choice.__name__]
    assert record.levelno == logging.WARNING and "because of attn_logit_softcapping=2.0" in record.getMessage()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma2", {"attn_implementation": "sdpa"}, "=sdpa drops attn_logit_softcapping=2.0: leave it out, or write"),
        ("gpt_oss", {"attn_implementation": "sdpa"}, "=sdpa is not supported for GptOssForCausalLM: leave it out"),
    ],
)
def test_advice_of_a_refusal_works(root: Path, family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.build(root / family, {"use_remove_padding": False, "override_config": options})
    eager = {"use_remove_padding": False, "override_config": {"attn_implementation": "eager"}}
    assert_equal(attention_cases.found(cases.build(root / family, eager)), root / family)


def test_what_cannot_be_packed_can_be_padded(tmp_path: Path) -> None:
    attention_cases.write(tmp_path, "doge", sliding_window=None)
    with pytest.raises(ConfigError, match="'doge' chooses among all tokens of a pass: write false"):
        cases.build(tmp_path)
    assert_equal(attention_cases.found(cases.build(tmp_path, {"use_remove_padding": False})), tmp_path)


def test_a_model_that_the_caller_has_built(root: Path) -> None:
    from transformers import AutoModelForCausalLM

    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine.fsdp.engine import FSDPEngineWithLMHead

    model = AutoModelForCausalLM.from_pretrained(root / "gemma2", attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"engine_config": FSDPEngineConfig(**cases.IN_FP32), "optimizer_config": FSDPOptimizerConfig()}
    engine = FSDPEngineWithLMHead.from_module(model, optimizer, remove_padding=False, **settings)
    assert_equal(attention_cases.found(engine), root / "gemma2")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_the_hf_rollout(root: Path, family: str) -> None:
    from verl.workers.rollout.hf_rollout import _build_model

    module: Any = _build_model(
        RolloutConfig(name="hf", dtype="float32", load_format="auto"), cases.model_config(root / family)
    )
    tensors = attention_cases.batch().batch
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    scores = module(**inputs).logits[:, attention_cases.PROMPT - 1 : -1].log_softmax(-1)
    found = scores.gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1) * tensors["response_mask"]
    torch.testing.assert_close(found, wanted(root / family)[0], atol=2e-4, rtol=0)


REFUSED = "would (let rows attend to each other|carry states)"
ROUNDING = {"hrm_text": 1e-2, "minimax": 1e-2}
"""Families whose layers amplify rounding: many passes of the same layers, and a running state."""
OTHERS = {
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert"),
    *("data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart"),
    "rembert",
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl"),
    *("moshi", "whisper", "ctrl", "rwkv", "recurrent_gemma", "cpmant", "xmod", "xlstm"),
}
"""Encoders, decoders of speech and translation, models without positions: padding before a row changes them."""
UNSTABLE = {"axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4"}
"""Families that choose keys by scores of which many are equal, so that rounding decides."""


def small(family: str) -> bool:
    try:
        with torch.device("meta"):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(attention_cases.config_of(family))
    except Exception:  # (each family fails in its own way if the sizes do not fit)
        return False
    return sum(parameter.numel() for parameter in model.parameters()) < 4e7


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - OTHERS - UNSTABLE - {"blt"}))
def test_every_text_family(family: str, tmp_path: Path) -> None:
    if not small(family):
        pytest.skip("these sizes do not fit the family")
    attention_cases.write(tmp_path / family, family, **FAMILIES.get(family, {}))
    folder, atol = tmp_path / family, ROUNDING.get(family, 1e-3)
    try:
        expected, _ = wanted(folder)
    except (RuntimeError, TypeError, KeyError) as error:
        pytest.skip(f"transformers' own pass fails with these sizes: {error}")
    for packed in (False, True):
        try:
            engine = cases.build(folder, {"use_remove_padding": packed})
            with engine.eval_mode():
                found = engine.infer_batch(attention_cases.batch())["log_probs"]
        except ConfigError as error:
            assert packed, error
            assert re.search(REFUSED, str(error)), error
            continue
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)
