"""Files with something wrong in them: data, scorers, checkpoints and models."""

import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
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
        (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / name).write_bytes(content)
        return {key: place.folder / name} | dict(extra or {})

    return make


def special(kind: str, key: str, extra: Overrides | None = None) -> Make:
    """Name what is no file: a ``pipe``, a ``socket``, a ``loop`` of links, or a link that is ``dangling``."""

    def make(place: Place) -> Overrides:
        path = place.folder / "odd.parquet"
        make_special(kind, path)
        return {key: path} | dict(extra or {})

    return make


def make_special(kind: str, path: Path) -> None:
    """Put what is no file at a path."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
                server.bind(f"{folder}/socket")
                os.rename(f"{folder}/socket", path)
    else:
        path.symlink_to(path if kind == "loop" else path.with_name("gone"))


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


def table(columns: Mapping[str, Any], key: str = "data.train_files", changes: Overrides | None = None) -> Make:
    """Name a parquet file of 16 rows that are right but for the given columns, each a list or an arrow array."""

    def make(place: Place) -> Overrides:
        right = pa.Table.from_pylist([row(i) for i in range(16)])
        arrays = {name: right[name] for name in right.column_names} | dict(columns)
        path = place.folder / "train.parquet"
        pq.write_table(pa.table(arrays), path)
        return {key: path} | dict(changes or {})

    return make


def bad_text(count: int) -> pa.Array:
    """Return strings that are not UTF-8, as careless writers leave them."""
    ends = pa.array(range(0, 2 * count + 1, 2), pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), count, [None, ends, pa.py_buffer(b"\xff\xfe" * count)])


def two_types(place: Place) -> Overrides:
    """Name two parquet files, one with a number and one with text in the same column."""
    (first,) = rows()(place).values()
    second = place.folder / "b.parquet"
    pq.write_table(pa.Table.from_pylist([row(i) | {"extra_info": {"index": str(i)}} for i in range(16)]), second)
    return {"data.train_files": f"[{first},{second}]"}


def twice(name: str) -> Make:
    """Name a parquet file with two columns of one name."""

    def make(place: Place) -> Overrides:
        right = pa.Table.from_pylist([row(i) for i in range(16)])
        doubled = right.append_column(name, right[name])
        pq.write_table(doubled, place.folder / "train.parquet")
        return {"data.train_files": place.folder / "train.parquet"}

    return make


def lines(
    *texts: str, name: str = "train.jsonl", key: str = "data.train_files", extra: Overrides | None = None
) -> Make:
    """Name a file of JSON lines: 16 that are right, then the given ones."""
    right = [json.dumps(row(i)) for i in range(16)]
    return written(name, "\n".join([*right, *texts]).encode(), key, extra)


def flipped(key: str = "data.train_files") -> Make:
    """Name a parquet file whose pages are damaged, and whose footer is whole."""

    def make(place: Place) -> Overrides:
        path = place.folder / "train.parquet"
        pq.write_table(pa.Table.from_pylist([row(i) for i in range(400)]), path, compression="snappy")
        content = bytearray(path.read_bytes())
        content[4:2000] = bytes(1996)
        path.write_bytes(content)
        return {key: path}

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
    odd: tuple[str, str] | None = None,
    prepared: str | None = None,
    renamed: int | None = None,
    world_size: int = 1,
    extra: Overrides | None = None,
) -> Make:
    """Write the checkpoints of steps 1 and 2, and damage the latter.

    ``odd`` is what takes the place of a file, and the file; a ``prepared`` file would run code; ``renamed`` is the
    number of another step, for the folder of step 2.
    """

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
        if odd is not None:
            make_special(odd[0], run / odd[1])
        if prepared is not None:
            torch.save(_Prints(), run / "global_step_2" / prepared)
        if renamed is not None:
            (run / "global_step_2").rename(run / f"global_step_{renamed}")
            write_tracker_atomically(run, renamed)
        chosen = (extra or {}).items()
        return {key: str(value).format(model=place.workspace.model, at=place.folder) for key, value in chosen}

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


class _Prints:
    """An object whose unpickling prints."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("a prepared file ran code",)


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
    settings: Mapping[str, Any] | None = None,
    without_tensor: str | None = None,
    with_tensor: str | None = None,
    swapped: tuple[str, str] | None = None,
    weights: bytes | None = None,
    odd: tuple[str, str] | None = None,
    key: str = "actor_rollout_ref.model.path",
    extra: Overrides | None = None,
) -> Make:
    """Copy the small model and damage it.

    ``config`` and ``settings`` change values of config.json and tokenizer_config.json; ``swapped`` are tokens that
    change their ids; ``odd`` is what takes the place of a file, and the file.
    """

    def make(place: Place) -> Overrides:
        folder = place.folder / "model"
        shutil.copytree(place.workspace.model, folder, dirs_exist_ok=True)
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        for name, content in (text or {}).items():
            (folder / name).write_text(content)
        for name, changes in (("config.json", config), ("tokenizer_config.json", settings)):
            if changes is not None:
                content = json.loads((folder / name).read_text())
                (folder / name).write_text(json.dumps(content | dict(changes)))
        if without_tensor is not None:
            tensors = load_file(folder / "model.safetensors")
            del tensors[without_tensor]
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if with_tensor is not None:
            tensors = load_file(folder / "model.safetensors") | {with_tensor: torch.zeros(1, 8)}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if swapped is not None:
            content = json.loads((folder / "tokenizer.json").read_text())
            vocab = content["model"]["vocab"]
            vocab |= {swapped[0]: vocab[swapped[1]], swapped[1]: vocab[swapped[0]]}
            (folder / "tokenizer.json").write_text(json.dumps(content))
        if cut is not None:
            _cut(folder / cut, 40)
        if weights is not None:
            (folder / "model.safetensors").write_bytes(weights)
        if odd is not None:
            make_special(odd[0], folder / odd[1])
        return {key: folder} | dict(extra or {})

    return make


def header(content: bytes, length: int | None = None) -> Make:
    """Copy the small model and give its weights this header, which claims to be ``length`` bytes long."""
    return model(weights=struct.pack("<Q", len(content) if length is None else length) + content)


def odd_heads(place: Place) -> Overrides:
    """Make a model with heads of 16, which vLLM's attention on CPU does not have."""
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer, hidden_size=64, num_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 4
    Qwen2ForCausalLM(config).save_pretrained(place.folder / "model")
    tokenizer.save_pretrained(place.folder / "model")
    return {"actor_rollout_ref.model.path": place.folder / "model"}
