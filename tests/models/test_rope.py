"""Each row gets the rotary positions that it has alone, for every type of RoPE scaling that the page on it lists.

The expected numbers are transformers' own, of a new model for each row. Tolerance: sums of fp32 in another order, the
largest difference found is 2e-6; frequencies of another row differ by 1e-2 and more.
"""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ranks import Ranks
from verl.base_config import ConfigError
from verl.models.transformers.rope import install_row_rope, packed_row_lengths, row_lengths
from verl.protocol import DataProto
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry

TOLERANCE = 1e-5
VOCAB, PROMPT, RESPONSE, PRETRAINED = 96, 4, 28, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LONG = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": PRETRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": PRETRAINED},
    "longrope": LONG,
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": PRETRAINED,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def config_of(kind: str, family: str = "Llama", **changes: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    positions = PRETRAINED if kind == "dynamic" else 64
    config_class = getattr(transformers, f"{family}Config")
    return config_class(**SHAPE, max_position_embeddings=positions, rope_parameters=rope, **changes)


def write(folder: Path, config: Any) -> str:
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else transformers.AutoModel
    auto = auto if hasattr(config, "vision_config") else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("rope")
    found = {kind: write(root / kind, config_of(kind)) for kind in ROPES}
    found["phi3"] = write(root / "phi3", config_of("longrope", "Phi3", original_max_position_embeddings=PRETRAINED))
    experts = {"num_local_experts": 2, "sliding_window": None}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **LONG, "short_mscale": 1.1, "long_mscale": 1.3}
    phimoe = transformers.PhimoeConfig(**SHAPE, **experts, max_position_embeddings=64, rope_parameters=rope)
    found["phimoe"] = write(root / "phimoe", phimoe)
    layers = {name: {"rope_theta": 1e4} for name in ("full_attention", "sliding_attention")}
    layers["full_attention"] |= {"rope_type": "dynamic", "factor": 4.0}
    layers["sliding_attention"] |= {"rope_type": "default"}
    gemma = {"head_dim": 16, "sliding_window": 64, "max_position_embeddings": PRETRAINED, "query_pre_attn_scalar": 16}
    layered = transformers.Gemma3TextConfig(
        **SHAPE, **gemma, rope_parameters=layers, layer_types=["full_attention", "sliding_attention"]
    )
    found["layers"] = write(root / "layers", layered)
    sharpened = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 1.0, "no_rope_layers": [1, 0]}
    llama4 = {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 64}
    found["llama4"] = write(root / "llama4", transformers.Llama4TextConfig(**SHAPE, **llama4, **sharpened))
    text = {**SHAPE, "max_position_embeddings": PRETRAINED}
    for name in ("mrope", "dynamic mrope"):
        scale = ROPES["dynamic"] if name != "mrope" else {}
        kind = {"rope_type": "dynamic" if scale else "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **scale}
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 2}
        config = transformers.Qwen2VLConfig(text_config={**text, "rope_parameters": kind}, vision_config=vision)
        config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
        found[name] = write(root / name.replace(" ", "_"), config)
    return found


MODELS = (*ROPES, "phi3", "phimoe", "layers", "llama4", "mrope", "dynamic mrope")


def batch_of(lengths: list[int], seed: int = 1) -> DataProto:
    """Return rows of these lengths whose positions go on through the padding, as after generation."""
    ids = torch.randint(3, VOCAB, (len(lengths), PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed))
    attended = (torch.arange(PROMPT + RESPONSE) < torch.tensor(lengths).unsqueeze(1) + PROMPT).long()
    ids = ids * attended
    tensors = {
        "input_ids": ids,
        "attention_mask": attended,
        "position_ids": torch.arange(PROMPT + RESPONSE).expand_as(ids).clone(),
        "responses": ids[:, PROMPT:],
        "response_mask": attended[:, PROMPT:],
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "micro_batch_size_per_gpu": len(lengths)})


def padded_left(data: DataProto) -> DataProto:
    """Return the batch with two columns of padding before each row, as prompts of different lengths have them."""
    tensors = {name: data.batch[name] for name in ("responses", "response_mask")}
    for name in ("input_ids", "attention_mask", "position_ids"):
        tensors[name] = F.pad(data.batch[name], (2, 0))
    return DataProto.from_dict(tensors, meta_info=data.meta_info)


def with_axes(data: DataProto) -> DataProto:
    """Return the batch with positions of text along four axes, as vision-language models take them."""
    positions = data.batch["position_ids"].unsqueeze(1).expand(-1, 4, -1).contiguous()
    tensors = {**dict(data.batch.items()), "position_ids": positions}
    return DataProto.from_dict(tensors, meta_info=data.meta_info)


def engine_of(folder: str, packed: bool, trains: bool = False, sp_size: int = 1, **options: Any) -> BaseEngine:
    model = HFModelConfig(
        path=folder, load_tokenizer=False, use_remove_padding=packed, enable_gradient_checkpointing=trains
    )
    engine = EngineRegistry.new(
        "language_model",
        "fsdp",
        model_config=model,
        engine_config=FSDPEngineConfig(forward_only=not trains, ulysses_sequence_parallel_size=sp_size),
        optimizer_config=FSDPOptimizerConfig(total_training_steps=1) if trains else None,
        checkpoint_config=None,
        **options,
    )
    engine.initialize()
    return engine


def model_of(folder: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    vision = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def alone(model: Any, row: Tensor) -> Tensor:
    """Return the log-probabilities of the response of one row."""
    logits = deepcopy(model)(input_ids=row.unsqueeze(0)).logits[0, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, row[PROMPT:, None])[:, 0]


LENGTHS = [6, 28, 12, 13, 20]  # 12 and 13 are the last of the pretraining's positions and the first beyond


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_log_probabilities_that_it_has_alone(folders: dict[str, str], name: str) -> None:
    model = model_of(folders[name])
    data = batch_of(LENGTHS)
    rows = data.batch["input_ids"]
    with torch.no_grad():
        expected = [alone(model, row[: PROMPT + length]) for row, length in zip(rows, LENGTHS, strict=True)]
    data = padded_left(data)
    data = with_axes(data) if "mrope" in name else data
    for packed in (True, False):
        if name == "layers" and packed:
            continue  # its layers of a window are another subject
        engine = engine_of(folders[name], packed)
        for _ in range(2):  # nothing is kept for the second pass
            with engine.eval_mode():
                found = engine.infer_batch(data)["log_probs"]
            for row, right in zip(found, expected, strict=True):
                torch.testing.assert_close(row[: len(right)], right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "llama4"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_row_has_the_gradient_that_it_has_alone(folders: dict[str, str], name: str, packed: bool) -> None:
    data = batch_of([6, 28])
    model = model_of(folders[name])
    for row, length in zip(data.batch["input_ids"], (6, 28), strict=True):
        copied = deepcopy(model)
        copied.zero_grad()
        logits = copied(input_ids=row[: PROMPT + length].unsqueeze(0)).logits[0, PROMPT - 1 : -1]
        logits.log_softmax(-1).gather(-1, row[PROMPT : PROMPT + length, None]).sum().backward()
        for total, part in zip(model.parameters(), copied.parameters(), strict=True):
            total.grad = part.grad.clone() if total.grad is None else total.grad + part.grad
    engine = engine_of(folders[name], packed, trains=True)
    with engine.train_mode():
        output = engine.forward(data, engine_spec())
        output["log_probs"].sum().backward()
        found = {key: parameter.grad for key, parameter in engine.module.named_parameters()}
    for key, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[key], parameter.grad, rtol=0, atol=1e-5 * max(scale, 1.0))


def engine_spec() -> Any:
    from verl.workers.engine.passes import PassSpec

    return PassSpec()


SHARED = ("dynamic", "longrope", "llama4", "dynamic mrope")


def run_rank(rank: int, folders: dict[str, str], results: Path) -> None:
    """Score rows that two ranks share (Ulysses), and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{results}/store", rank=rank, world_size=2)
    found = {}
    for name in SHARED:
        engine = engine_of(folders[name], packed=True, sp_size=2)
        data = batch_of(LENGTHS)
        with engine.eval_mode():
            found[name] = engine.infer_batch(with_axes(data) if "mrope" in name else data)["log_probs"]
    torch.save(found, results / f"rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.full
def test_ranks_that_share_rows_compute_what_a_row_has_alone(folders: dict[str, str], tmp_path: Path) -> None:
    Ranks(run_rank, (folders, tmp_path), nprocs=2).join()
    rows = batch_of(LENGTHS).batch["input_ids"]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank_{rank}.pt")
        for name in SHARED:
            model = model_of(folders[name])
            for at, length in enumerate(LENGTHS):
                with torch.no_grad():
                    right = alone(model, rows[at, : PROMPT + length])
                torch.testing.assert_close(found[name][at, :length], right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3"])
def test_all_rows_choose_by_the_length_of_a_run(folders: dict[str, str], name: str) -> None:
    data = batch_of([6, 28])
    row = data.batch["input_ids"][0, : PROMPT + 6]
    model = model_of(folders[name])
    with torch.no_grad():
        long = torch.cat([row, row.new_full((40 - len(row),), 5)])
        expected = alone(model, long)[:6]  # causal: what follows changes the frequencies alone
        for packed in (True, False):
            engine = engine_of(folders[name], packed, rope_length=40)
            with engine.eval_mode():
                found = engine.infer_batch(data)["log_probs"][0, :6]
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_rows_that_choose_share_no_tokens(folders: dict[str, str]) -> None:
    model = HFModelConfig(
        path=folders["dynamic"], load_tokenizer=False, use_remove_padding=True, use_prefix_sharing=True
    )
    engine = EngineRegistry.new(
        "language_model", "fsdp", model_config=model, engine_config=FSDPEngineConfig(forward_only=True)
    )
    with pytest.raises(ConfigError, match="use_prefix_sharing=true: needs positions that do not depend on the length"):
        engine.initialize()


@pytest.fixture(scope="module")
def rotary(folders: dict[str, str]) -> dict[str, Any]:
    return {name: model_of(folders[name]) for name in ("dynamic", "longrope")}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["dynamic", "longrope"]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    packed=st.booleans(),
)
def test_angles_of_a_row_follow_from_its_length(
    rotary: dict[str, Any], kind: str, lengths: list[int], packed: bool
) -> None:
    model = rotary[kind]
    rows = install_row_rope(model)
    module = model.model.rotary_emb
    x = torch.zeros(1)
    positions = [torch.arange(length) for length in lengths]
    if packed:
        ids = torch.cat(positions).unsqueeze(0)
        with rows.rows(packed_row_lengths(ids, lengths)):
            cos, _ = module(x, ids)
        found = list(cos[0].split(lengths))
    else:
        ids = torch.arange(max(lengths)).expand(len(lengths), -1)
        attended = ids < torch.tensor(lengths).unsqueeze(1)
        with rows.rows(row_lengths(ids, attended)):
            cos, _ = module(x, ids)
        found = [row[:length] for row, length in zip(cos, lengths, strict=True)]
    for angles, own in zip(found, positions, strict=True):
        expected, _ = type(module)(module.config)(x, own.unsqueeze(0))  # a new module has no earlier pass
        torch.testing.assert_close(angles, expected[0], rtol=0, atol=0)
