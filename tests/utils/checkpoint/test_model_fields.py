"""Another model is found before the start, by files, with the words of the load; the same model never is."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from verl.trainer.run.resume import misfit
from verl.utils.checkpoint.files import LAYOUT_NAME
from verl.utils.checkpoint.hf_export import SourceFiles
from verl.utils.checkpoint.model_fields import FIELDS_KEY, fields_problem, forward_fields
from verl.workers.config import HFModelConfig
from verl.workers.config.actor_critic import CheckpointConfig

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FILES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **SMALL, "rope_theta": 1e6, "sliding_window": 32, "use_sliding_window": False},
    "qwen3 yarn": {"model_type": "qwen3", **SMALL, "rope_theta": 1e6, "rope_scaling": YARN, "head_dim": 16},
    "llama": {
        "model_type": "llama",
        **SMALL,
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
    },
    "llama of transformers 5": {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "gemma3": {"model_type": "gemma3_text", **SMALL, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "glm4_moe": {"model_type": "glm4_moe", **SMALL, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3", **SMALL, "rope_theta": 1e4, "rope_scaling": None, "pad_token_id": 0},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **SMALL,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 2, "hidden_size": 32},
    },
}


described = partial(HFModelConfig, load_tokenizer=False)
"""The node of a model whose folder holds its configuration alone."""


def model_folder(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def saved(folder: Path, model: HFModelConfig) -> Path:
    """Write what the checkpoint of a model tells about its configuration."""
    source = SourceFiles(Path(model.path), Path(model.path), AutoConfig.from_pretrained(model.path))
    layout = {"world_size": 1, FIELDS_KEY: forward_fields(None, model.hf_config)}
    folder.mkdir(exist_ok=True)
    (folder / LAYOUT_NAME).write_text(json.dumps(layout), encoding="utf-8")
    model_folder(folder / "huggingface", source.config_fields(model.hf_config))
    return folder


def problem(folder: Path, model: HFModelConfig, **options: Any) -> str | None:
    return misfit(folder, "fsdp", 1, model, CheckpointConfig(**options))


@pytest.mark.parametrize("name", FILES)
def test_the_same_model_fits_and_another_base_of_rope_does_not(tmp_path: Path, name: str) -> None:
    path = model_folder(tmp_path / "model", FILES[name])
    checkpoint = saved(tmp_path / "actor", described(path=str(path)))
    assert problem(checkpoint, described(path=str(path))) is None
    other = described(path=str(path), override_config={"rms_norm_eps": 0.25})
    found = problem(checkpoint, other)
    assert found is not None and "rms_norm_eps=0.25, and 1e-0" in found
    stored = json.loads((checkpoint / LAYOUT_NAME).read_text(encoding="utf-8"))[FIELDS_KEY]
    assert found == fields_problem(stored, forward_fields(None, other.hf_config))  # the words of the load
    assert problem(checkpoint, other, load_contents=["optimizer", "extra"]) is None


@pytest.mark.parametrize("name", [name for name in FILES if name != "gemma3"])
def test_another_rope_is_found_in_the_file_of_the_model(tmp_path: Path, name: str) -> None:
    path = model_folder(tmp_path / "model", FILES[name])
    checkpoint = saved(tmp_path / "actor", described(path=str(path)))
    content = json.loads(json.dumps(FILES[name]))
    node = content.get("rope_parameters", content)
    node["rope_theta"] = 123.0
    model_folder(path, content)
    assert "rope_parameters.rope_theta=123.0, and " in str(problem(checkpoint, described(path=str(path))))


def test_what_a_run_changes_itself_fits_a_run_that_does_the_same(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", FILES["qwen2"])
    changes = {"rope_theta": 5e5, "rope_scaling": YARN}
    checkpoint = saved(tmp_path / "actor", described(path=str(path), override_config=changes))
    assert problem(checkpoint, described(path=str(path), override_config=changes)) is None
    assert "rope_theta=1000000.0, and 500000.0 in" in str(problem(checkpoint, described(path=str(path))))


def test_a_checkpoint_or_a_model_that_does_not_tell_fits(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", FILES["qwen2"])
    checkpoint = saved(tmp_path / "actor", described(path=str(path)))
    assert problem(checkpoint, described(path="name/of-the-hub")) is None
    shutil.rmtree(checkpoint / "huggingface")
    assert problem(checkpoint, described(path=str(path), override_config={"rms_norm_eps": 0.25})) is None
    (checkpoint / LAYOUT_NAME).write_text('{"world_size": 1}', encoding="utf-8")  # of an older version
    assert problem(checkpoint, described(path=str(path))) is None


def test_the_scale_of_adapters_is_compared(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", FILES["qwen2"])
    checkpoint = saved(tmp_path / "actor", described(path=str(path)))
    layout = json.loads((checkpoint / LAYOUT_NAME).read_text(encoding="utf-8"))
    layout[FIELDS_KEY]["lora_alpha"] = 16
    (checkpoint / LAYOUT_NAME).write_text(json.dumps(layout), encoding="utf-8")
    of_run = {"path": str(path), "lora_rank": 4}
    assert problem(checkpoint, described(**of_run, lora_alpha=16)) is None
    assert "lora_alpha=32, and 16 in the checkpoint" in str(problem(checkpoint, described(**of_run, lora_alpha=32)))
