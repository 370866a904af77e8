"""Models with remote code: what is refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.test_validation import changed, violations
from verl.base_config import ConfigError
from verl.trainer.config.sft import parse_sft_config

MODEL, DATA = "actor_rollout_ref.model", "data.trust_remote_code"
CLASSES = {"data.custom_cls.path": "recipe/minicpmo/rl_dataset.py", "data.custom_cls.name": "RLHFDataset"}


@pytest.fixture(scope="module")
def base(composed):
    return composed()


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Write the files of a model that the checks read."""

    def write(family: str, images: bool = True, tokenizer: str = "TokenizersBackend", **fields: Any) -> Path:
        path = tmp_path / family
        path.mkdir(exist_ok=True)
        config = {"model_type": family, "auto_map": {"AutoConfig": "configuration.Config"}} | fields
        if images:
            config["vision_config"] = {}
            maps = {"AutoProcessor": "processing.Processor"}
            (path / "preprocessor_config.json").write_text(json.dumps({"auto_map": maps}))
        (path / "config.json").write_text(json.dumps(config))
        (path / "tokenizer.json").write_text('{"model": {}}')
        settings = {"tokenizer_class": tokenizer, "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}
        (path / "tokenizer_config.json").write_text(json.dumps(settings if tokenizer == "Own" else {}))
        return path

    return write


def refused(base: Any, changes: dict[str, Any], critic: bool = False) -> dict[str, str]:
    return violations(base, {"trainer.n_gpus_per_node": 2} | changes, use_critic=critic)


def test_code_runs_with_permission_only(base: Any, folder: Any) -> None:
    path = {f"{MODEL}.path": str(folder("kimi_vl"))}
    found = refused(base, path)
    assert found.keys() == {f"{MODEL}.trust_remote_code", DATA}
    shown = f"{MODEL}.trust_remote_code=false: transformers has no model_type='kimi_vl', so "
    assert found[f"{MODEL}.trust_remote_code"].startswith(shown) and "read it, then write true" in str(found)
    assert "the processor of " in found[DATA]
    assert refused(base, path | {f"{MODEL}.trust_remote_code": True, DATA: True}) == {}
    # transformers has this type, and code in the folder stays unread
    known = {f"{MODEL}.path": str(folder("deepseek_v3", images=False))}
    assert refused(base, known) == {}
    known = {f"{MODEL}.path": str(folder("deepseek_v3", images=False, tokenizer="Own"))}
    assert refused(base, known).keys() == {DATA} and "the tokenizer of " in refused(base, known)[DATA]


def test_what_a_family_cannot_do(base: Any, folder: Any) -> None:
    """Several workers, padding removal and Ulysses are what it can."""
    for family, more in (("kimi_vl", {}), ("minicpmo", CLASSES)):
        path = str(folder(family))
        trusted = {f"{MODEL}.path": path, f"{MODEL}.trust_remote_code": True, DATA: True} | more
        ulysses = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2, f"{MODEL}.use_remove_padding": True}
        assert refused(base, trusted | ulysses) == {}
        found = refused(base, trusted | {f"{MODEL}.use_fused_kernels": True, "actor_rollout_ref.rollout.name": "hf"})
        assert found.keys() == {f"{MODEL}.use_fused_kernels", "actor_rollout_ref.rollout.name"}
        assert found[f"{MODEL}.use_fused_kernels"].endswith(f"model_type={family!r} has no fused head: write false")
        loaded = refused(base, trusted | {"actor_rollout_ref.rollout.load_format": "auto"})
        assert loaded.keys() == ({"actor_rollout_ref.rollout.load_format"} if family == "kimi_vl" else set())
        apart = {"actor_rollout_ref.hybrid_engine": False, "actor_rollout_ref.rollout.mode": "async"}
        apart["actor_rollout_ref.rollout.n_gpus_per_node"] = 1
        read = "actor_rollout_ref.rollout.engine_kwargs.vllm"
        for kwargs, where in (({}, set()), ({"quantization": "fp8"}, {f"{read}.quantization"})):
            found = refused(base, trusted | apart | {read: kwargs})
            assert found.keys() == (where if family == "kimi_vl" else set()), found
        found = refused(base, trusted | {"critic.model.path": path}, critic=True)
        assert "no value head: choose an estimator without a critic" in found["critic.model.path"]
        judge = {
            "reward_model.enable": True,
            "reward_model.model.path": path,
            "reward_model.model.input_tokenizer": None,
        }
        found = refused(base, trusted | judge | {"reward_model.micro_batch_size_per_gpu": 1})
        assert found.keys() == {"reward_model.model.path", "reward_model.model.trust_remote_code"}
    without = {key: value for key, value in trusted.items() if key not in CLASSES}
    assert "recipe/minicpmo/rl_dataset.py" in refused(base, without)["data.custom_cls.path"]


def test_supervised_training(composed: Any, folder: Any) -> None:
    tree = composed("data.train_files=rows.parquet", "model.path=model", name="sft_trainer_engine", base=False)
    for family, due in (("kimi_vl", set()), ("minicpmo", {"data.custom_cls.path"})):
        changes = {"model.path": str(folder(family))}
        assert own_keys(tree, changes) == due | {"model.trust_remote_code"}
        changes["model.trust_remote_code"] = True
        assert own_keys(tree, changes) == due
        assert own_keys(tree, changes | {"model.use_fused_kernels": True}) == due | {"model.use_fused_kernels"}


def own_keys(tree: Any, changes: dict[str, Any]) -> set[str]:
    """Return the keys that are refused, but for the file that does not exist."""
    try:
        parse_sft_config(changed(tree, changes), 2)
    except ConfigError as error:
        return {violation.key for violation in error.violations} - {"data.train_files"}
    return set()
