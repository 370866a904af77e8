"""Names of shared memory that a killed engine leaves on the node."""

import mmap
import os
import time

import pytest

pytest.importorskip("vllm")

from verl.workers.rollout.vllm_rollout import patch


def test_only_old_unmapped_segments_of_engines_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(patch, "_SHARED_MEMORY", tmp_path)
    old = time.time() - 2 * patch._START_LIMIT_S
    names = {
        "stale": "1795230501848268615-tp:0-[0-1]-cpushm_0",
        "mapped": "1795230501848268616-tp:0-[0-1]-cpushm_1",
        "young": "1795230501848268617-tp:0-[0-1]-cpushm_0",
        "foreign": "-tp:0-[0-1]-cpushm_0",
    }
    for kind, name in names.items():
        (tmp_path / name).write_bytes(bytes(4096))
        if kind != "young":
            os.utime(tmp_path / name, (old, old))
    with (tmp_path / names["mapped"]).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        patch.remove_stale_shared_memory()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        name for kind, name in names.items() if kind != "stale"
    )
    patch.remove_stale_shared_memory()
    assert not (tmp_path / names["mapped"]).exists()


def test_the_names_of_a_started_engine_are_taken_off(tmp_path, monkeypatch):
    monkeypatch.setattr(patch, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(patch, "_ring_buffers", lambda: iter(()))
    for token in (17, 18):
        (tmp_path / f"{token}-tp:0-[0-1]-cpushm_0").write_bytes(b"")
    patch.unlink_shared_memory(17)
    assert [path.name for path in tmp_path.iterdir()] == ["18-tp:0-[0-1]-cpushm_0"]
