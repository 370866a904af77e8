"""Files with something wrong in them: data, scorers, checkpoints and models."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from examples.tiny_model import byte_tokenizer, tiny_config
from verl.trainer.ppo.checkpoint import save_driver_state
from verl.utils.checkpoint.files import LAYOUT_NAME, Manifest, write_file, write_tracker_atomically

from .wrong_inputs import Overrides, Place

Make = Callable[[Place], Overrides]


def written(name: str, content: bytes, key: str, extra: Overrides | None = None) -> Make:
    """Name a file with this content."""

    def make(place: Place) -> Overrides:
        (place.folder / name).write_bytes(content)
        return {key: place.folder / name} | dict(extra or {})

    return make


# ---- data


def row(index: int, text: str = "1 + 1 =") -> dict[str, Any]:
    """Return a row that is right."""
    return {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "letters"},
        "extra_info": {"index": index},
    }


def rows(
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    all_rows: Mapping[str, Any] | None = None,
    count: int = 16,
    drop: str | None = None,
    cut: int = 0,
    key: str = "data.train_files",
    extra: Overrides | None = None,
) -> Make:
    """Name a parquet file of ``count`` rows, some of which or all of which are changed."""

    def make(place: Place) -> Overrides:
        table = [row(i) | dict(all_rows or {}) | dict((changes or {}).get(i, {})) for i in range(max(count, 1))]
        frame = pd.DataFrame(table).iloc[:count]
        path = place.folder / "train.parquet"
        frame.drop(columns=[drop] if drop else []).to_parquet(path)
        _cut(path, cut)
        return {key: path} | dict(extra or {})

    return make


def _cut(path: Path, last_bytes: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - last_bytes])


# ---- reward functions


def scorer(text: str, whole: bool = False, extra: Overrides | None = None) -> Make:
    """Name a reward function with this body, or a whole file."""
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    content = text if whole else f"{head}    {text}\n"
    return written("reward.py", content.encode(), "custom_reward_function.path", extra)


# ---- checkpoints


def edited(name: str, content: bytes) -> tuple[str, bytes]:
    """Write a file of the run anew."""
    return name, content


def checkpoint(
    edit: tuple[str, bytes] | None = None,
    cut: str | None = None,
    gone: str | None = None,
    flip: str | None = None,
    world_size: int = 1,
    extra: Overrides | None = None,
) -> Make:
    """Write the checkpoints of steps 1 and 2, and damage the latter."""

    def make(place: Place) -> Overrides:
        run = place.folder / "run"
        for step in (1, 2):
            _write_checkpoint(run / f"global_step_{step}", step, world_size)
        write_tracker_atomically(run, 2)
        if edit is not None:
            (run / edit[0]).write_bytes(edit[1])
        if gone is not None:
            (run / "global_step_2" / gone).unlink()
        if cut is not None:
            _cut(run / "global_step_2" / cut, 40)
        if flip is not None:
            _flip(run / "global_step_2" / flip)
        return {key: str(value).format(model=place.workspace.model) for key, value in (extra or {}).items()}

    return make


def _write_checkpoint(folder: Path, step: int, world_size: int) -> None:
    layout = json.dumps({"FSDP_version": 2, "world_size": world_size}).encode()
    for rank in range(world_size):
        parts = {
            "model": {"weight": torch.arange(64.0)},
            "optim": {"state": {}, "param_groups": []},
            "extra_state": {"rng": {}},
        }
        records = [
            write_file(
                folder / "actor", f"{part}_world_size_{world_size}_rank_{rank}.pt", lambda f, s=state: torch.save(s, f)
            )
            for part, state in parts.items()
        ]
        if rank == 0:
            records.append(write_file(folder / "actor", LAYOUT_NAME, lambda f: f.write(layout)))
        Manifest(world_size, rank, step, records).write(folder / "actor")
    save_driver_state(folder, {"position": step}, {"seed": 1})


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---- models


def model(
    cut: str | None = None,
    gone: tuple[str, ...] = (),
    text: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    without_tensor: str | None = None,
    extra: Overrides | None = None,
) -> Make:
    """Copy the small model and damage it."""

    def make(place: Place) -> Overrides:
        folder = place.folder / "model"
        shutil.copytree(place.workspace.model, folder, dirs_exist_ok=True)
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        for name, content in (text or {}).items():
            (folder / name).write_text(content)
        if config is not None:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | dict(config)))
        if without_tensor is not None:
            tensors = load_file(folder / "model.safetensors")
            del tensors[without_tensor]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if cut is not None:
            _cut(folder / cut, 40)
        return {"actor_rollout_ref.model.path": folder} | dict(extra or {})

    return make


def odd_heads(place: Place) -> Overrides:
    """Make a model with heads of 16, which vLLM's attention on CPU does not have."""
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer, hidden_size=64, num_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 4
    Qwen2ForCausalLM(config).save_pretrained(place.folder / "model")
    tokenizer.save_pretrained(place.folder / "model")
    return {"actor_rollout_ref.model.path": place.folder / "model"}
