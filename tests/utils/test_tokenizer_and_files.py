"""Loading of tokenizers, and staging of files."""

import ctypes
import fcntl
import json
import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import verl.utils
from examples.tiny_model import make_tiny_model
from verl.errors import DataError
from verl.utils import fs, hdfs_io, hf_processor, hf_tokenizer
from verl.utils.tokenizer import one_thread


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("model")), hidden_size=32, num_layers=1)


def test_the_byte_tokenizer_round_trips_every_byte(model):
    tokenizer = hf_tokenizer(model)
    text = "".join(map(chr, range(1, 256))) + "\n\t  ä€😀 '' .. 12"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|end|>"
    assert tokenizer("<|user|>a<|end|>")["input_ids"][::2] == tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    assert hf_processor(model) is None


def test_padding_falls_back_to_the_end_of_sequence(model, tmp_path):
    bare = hf_tokenizer(model)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    os.link(os.path.join(model, "config.json"), tmp_path / "config.json")
    plain, corrected = hf_tokenizer(str(tmp_path), correct_pad_token=False), hf_tokenizer(str(tmp_path))
    # the class that AutoTokenizer picks for a model type may bring a padding token of its own
    wanted = corrected.eos_token_id if plain.pad_token_id is None else plain.pad_token_id
    assert corrected.pad_token_id == wanted


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_tokenizer_is_named(tmp_path, exists):
    path = tmp_path / "nothing"
    if exists:
        path.mkdir()
    with pytest.raises(OSError, match=str(path)) as caught:
        hf_tokenizer(str(path))
    assert isinstance(caught.value, ValueError)


def test_code_of_a_repository_runs_only_if_it_is_trusted(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["code.Tokenizer", None], "AutoConfig": "code.Config"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": auto_map}))
    with pytest.raises(ValueError, match="trust_remote_code=True"):  # and nobody is asked at the terminal
        hf_tokenizer(str(tmp_path))
    assert hf_processor(str(tmp_path)) is None and not (tmp_path / "made").exists()


def test_package_exports():
    assert {"hf_tokenizer", "hf_processor", "as_torch_index", "group_mean_std"} <= set(verl.utils.__all__)
    for name in verl.utils.__all__:
        assert callable(getattr(verl.utils, name))
    with pytest.raises(AttributeError, match="nothing"):
        _ = verl.utils.nothing


FAKE_HDFS = """#!/bin/sh
# dfs on a local folder: hdfs://x is $HDFS_ROOT/x
shift
operation=$1; shift
while [ "${1#-}" != "$1" ]; do shift; done
source=$(echo "$1" | sed "s|hdfs://|$HDFS_ROOT/|"); target=$(echo "$2" | sed "s|hdfs://|$HDFS_ROOT/|")
case $operation in
  -test) test -e "$source" ;;
  -mkdir) mkdir -p "$source" ;;
  -ls) find "$source" -type f -printf "-rw-r--r-- 1 me us %s %TY-%Tm-%Td %TH:%TM hdfs://%P\\n" ;;
  -checksum) find "$HDFS_ROOT/data" -type f -exec md5sum {} + ;;
  -rm) rm -rf "$source" ;;
  -mv) mv "$source" "$target" ;;
  -get|-put|-cp) echo copied >> "$HDFS_ROOT/log"; cp -r "$source" "$target" ;;
esac
"""


@pytest.fixture
def hdfs(tmp_path, monkeypatch):
    """Put an ``hdfs`` command on the path that keeps its files in a local folder; returns that folder."""
    command = tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(FAKE_HDFS)
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    root = tmp_path / "root"
    (root / "data" / "set").mkdir(parents=True)
    (root / "data" / "set" / "a.txt").write_text("aaa")
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HDFS_ROOT", str(root))
    return root


def copies(root):
    return (root / "log").read_text().count("copied") if (root / "log").exists() else 0


def test_remote_folders_are_copied_once_and_again_when_incomplete(hdfs, tmp_path):
    cache = str(tmp_path / "cache")
    local = fs.copy_to_local("hdfs://data/set", cache_dir=cache)
    assert local == fs.get_local_temp_path("hdfs://data/set", cache) and os.listdir(local) != []
    assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == local and copies(hdfs) == 1
    os.remove(os.path.join(local, "a.txt"))
    assert open(os.path.join(fs.copy_to_local("hdfs://data/set", cache_dir=cache), "a.txt")).read() == "aaa"
    assert copies(hdfs) == 2
    fs.copy_to_local("hdfs://data/set", cache_dir=cache, always_recopy=True)
    assert copies(hdfs) == 3


def test_remote_copies_follow_their_source(hdfs, tmp_path, monkeypatch):
    """Another content of the same size is noticed; where HDFS tells nothing, each process copies once."""
    cache = str(tmp_path / "cache")
    local = fs.copy_to_local("hdfs://data/set", cache_dir=cache)
    monkeypatch.setattr(fs, "_copied", set())  # as another process
    assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == local and copies(hdfs) == 1
    (hdfs / "data" / "set" / "a.txt").write_text("bbb")
    assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == local and copies(hdfs) == 2
    assert Path(local, "a.txt").read_text() == "bbb"
    monkeypatch.setattr(fs, "_copied", set())
    monkeypatch.setattr(hdfs_io, "state_of", lambda path: None)
    assert [fs.copy_to_local("hdfs://data/set", cache_dir=cache) for _ in range(2)] == [local] * 2
    assert copies(hdfs) == 3


def test_a_remote_copy_that_another_process_reads_stays(hdfs, tmp_path, caplog):
    """The new one gets a place of its own, which the next process uses too, and which goes when nobody needs it."""
    source, cache = hdfs / "data" / "set" / "a.txt", str(tmp_path / "cache")
    local = fs.copy_to_local("hdfs://data/set", cache_dir=cache)
    with other_reader(local):
        assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == local and copies(hdfs) == 1
        source.write_text("bbb")
        second = fs.copy_to_local("hdfs://data/set", cache_dir=cache)
        assert second != local and f"another process reads {local}, which is older" in caplog.text
        assert [Path(each, "a.txt").read_text() for each in (local, second)] == ["aaa", "bbb"]
        assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == second and copies(hdfs) == 2
        third = fs.copy_to_local("hdfs://data/set/a.txt", cache_dir=cache)
        with other_reader(third):
            assert fs.copy_to_local("hdfs://data/set/a.txt", cache_dir=cache, always_recopy=True) != third
    assert fs.copy_to_local("hdfs://data/set", cache_dir=cache) == local
    assert Path(local, "a.txt").read_text() == "bbb" and not os.path.exists(second)


def test_a_folder_that_another_user_has_prepared_for_remote_copies_is_not_read(hdfs, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs.tempfile, "gettempdir", lambda: str(tmp_path))
    local = fs.copy_to_local("hdfs://data/set")
    home = tmp_path / f"verl-cache-{os.getuid()}"
    assert Path(local).is_relative_to(home) and stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(0o777)
    again = fs.copy_to_local("hdfs://data/set")
    assert not Path(again).is_relative_to(home) and Path(again, "a.txt").read_text() == "aaa"
    assert f"{home} is open to other users" in caplog.text


@contextmanager
def other_reader(copy):
    """Read a copy as another process does."""
    reader = os.open(f"{copy}.readers", os.O_RDWR)
    try:
        fcntl.flock(reader, fcntl.LOCK_SH)
        yield
    finally:
        os.close(reader)


def test_remote_operations(hdfs, tmp_path):
    assert hdfs_io.exists("hdfs://data/set") and not hdfs_io.exists("hdfs://data/none")
    hdfs_io.makedirs("hdfs://new/folder")
    assert (hdfs / "new" / "folder").is_dir()
    (tmp_path / "b.txt").write_text("b")
    hdfs_io.copy(str(tmp_path / "b.txt"), "hdfs://new/b.txt")
    assert (hdfs / "new" / "b.txt").read_text() == "b"
    with pytest.raises(hdfs_io.HdfsError, match="failed with code"):
        hdfs_io.copy("hdfs://none", str(tmp_path / "c"))


@pytest.mark.parametrize("place", ["hdfs://new/runs/actor", "{tmp_path}/new/runs/actor"])
def test_a_folder_takes_the_place_of_the_one_before(hdfs, tmp_path, place):
    place, source = place.format(tmp_path=tmp_path), tmp_path / "source"
    target = hdfs / "new" / "runs" / "actor" if place.startswith("hdfs") else tmp_path / "new" / "runs" / "actor"
    for name in ("first", "second"):
        source.mkdir()
        (source / name).touch()
        hdfs_io.put_folder(str(source), place)
        assert [path.name for path in target.iterdir()] == [name] and list(target.parent.iterdir()) == [target]
        shutil.rmtree(source)


def test_local_paths_stay_as_they_are(tmp_path):
    assert fs.copy_to_local(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="must not end with a slash"):
        fs.copy_to_local(str(tmp_path) + "/")
    assert fs.is_non_local("hdfs://x") and not fs.is_non_local("/x")
    (tmp_path / "a").write_text("1")
    assert not fs.verify_copy(str(tmp_path / "a"), str(tmp_path / "b"))
    hdfs_io.copy(str(tmp_path / "a"), str(tmp_path / "b"))
    assert fs.verify_copy(str(tmp_path / "a"), str(tmp_path / "b"))
    assert fs.local_mkdir_safe(str(tmp_path / "x" / "y")) == str(tmp_path / "x" / "y")


def test_staging_in_shared_memory(tmp_path, monkeypatch, caplog):
    """``use_shm`` reads a copy; where there is no room the file itself."""
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    copy = fs.copy_to_local(str(tmp_path / "model"), use_shm=True)
    assert copy.startswith(str(tmp_path / "shm")) and os.listdir(copy) == ["config.json"]
    assert fs.copy_to_local(str(tmp_path / "model"), use_shm=True) == copy
    (tmp_path / "model" / "weights").write_text("more")
    assert sorted(os.listdir(fs.copy_to_local(str(tmp_path / "model"), use_shm=True))) == ["config.json", "weights"]
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 0}))
    (tmp_path / "rows").write_text("rows")
    assert fs.copy_to_local(str(tmp_path / "rows"), use_shm=True) == str(tmp_path / "rows")
    assert "is read from disk, not from shared memory: it needs 4 bytes, 0 are free" in caplog.text


def _stage(source: Path) -> Path:
    return Path(fs.copy_to_local(str(source), use_shm=True))


def test_a_copy_follows_its_source(tmp_path, monkeypatch):
    """Another content of the same size, also under the old time, and a file that is gone."""
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_text("old")
    (source / "gone").write_text("")
    copy = _stage(source)
    times = os.stat(source / "weights").st_mtime_ns
    (source / "weights").write_text("new")
    assert _stage(source) == copy and (copy / "weights").read_text() == "new"
    (source / "other").write_text("3rd")
    os.utime(source / "other", ns=(times, times))
    os.replace(source / "other", source / "weights")
    (source / "gone").unlink()
    assert _stage(source) == copy and (copy / "weights").read_text() == "3rd"
    assert os.listdir(copy) == ["weights"]
    (copy / "weights").unlink()
    assert (_stage(source) / "weights").read_text() == "3rd"


def test_a_copy_that_another_process_reads_stays(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source = tmp_path / "rows"
    source.write_text("old")
    copy = _stage(source)
    with other_reader(copy):
        source.write_text("new")
        assert _stage(source) == source and copy.read_text() == "old"
        assert "another process reads the copy" in caplog.text
    with open(f"{copy}.readers") as other, pytest.raises(BlockingIOError):  # what it tried has kept the own lock
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert _stage(source) == copy and copy.read_text() == "new"


def test_a_copy_follows_what_links_lead_to(tmp_path, monkeypatch, caplog):
    """A linked model with a linked subfolder; and a content that was written in place, whose time was set back."""
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    real, link = tmp_path / "real", tmp_path / "link"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("old")
    real.mkdir()
    (real / "part").symlink_to(tmp_path / "elsewhere")
    link.symlink_to(real)
    copy = _stage(link)
    inode = (copy / "part" / "weights").stat().st_ino
    assert _stage(link) == copy and (copy / "part" / "weights").stat().st_ino == inode
    times = os.stat(real / "part" / "weights").st_mtime_ns
    with open(real / "part" / "weights", "r+") as file:
        file.write("new")
    os.utime(real / "part" / "weights", ns=(times, times))
    assert _stage(link) == copy and (copy / "part" / "weights").read_text() == "new"
    (tmp_path / "another").mkdir()
    link.unlink()
    link.symlink_to(tmp_path / "another")
    assert _stage(link) == copy and os.listdir(copy) == []
    (tmp_path / "another" / "nowhere").symlink_to(tmp_path / "gone")
    assert _stage(link) == link and "is read from disk, not from shared memory" in caplog.text


COPY = """
import os, sys, time
from pathlib import Path
from verl.utils import fs
fs.SHM_ROOT = sys.argv[2]
copy = fs.shutil.copy
def slow(*paths):
    Path(sys.argv[3]).touch()
    time.sleep(60 if sys.argv[4] == "hangs" else 0.2)
    return copy(*paths)
fs.shutil.copy = slow
found = Path(fs.copy_to_shm(sys.argv[1]))
print(found, found.read_text(), found.stat().st_ino)
sys.stdout.flush()
sys.stdin.read()
"""


def test_processes_that_copy_at_once_and_one_that_dies(tmp_path):
    """The copy that a kill has interrupted is made anew, once, and all read it."""
    source, began = tmp_path / "rows", tmp_path / "began"
    source.write_text("content")

    def start(manner):
        words = [sys.executable, "-c", COPY, str(source), str(tmp_path / "shm"), str(began), manner]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, cwd=Path(verl.utils.__file__).parents[2], text=True, **pipes)

    with start("hangs") as killed:
        while not began.exists():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    both = [start("copies") for _ in range(2)]
    lines = [process.stdout.readline() for process in both]
    assert lines[0] == lines[1] and " content " in lines[0] and str(tmp_path / "shm") in lines[0]
    assert [process.communicate()[1] for process in both] == ["", ""]


def test_a_copy_in_a_folder_of_others_is_not_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHM_ROOT", str(tmp_path / "shm"))
    source, home = tmp_path / "rows", Path(f"{tmp_path / 'shm'}-{os.getuid()}")
    source.write_text("a")
    assert _stage(source).is_relative_to(home) and stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(0o777)
    assert _stage(source) == source and "is open to other users" in caplog.text
    home.chmod(0o700)
    monkeypatch.setattr(fs.os, "getuid", lambda: 12345)
    Path(f"{tmp_path / 'shm'}-12345").symlink_to(home)
    assert _stage(source) == source and "belongs to another user" in caplog.text


def test_without_the_command_the_path_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hdfs_io.HdfsError, match="hdfs://x: HDFS paths need the `hdfs` command"):
        hdfs_io.exists("hdfs://x")


def test_what_is_no_file_is_named_and_never_opened(tmp_path):
    from verl.utils.dataset.files import read_parquet

    made = {kind: tmp_path / f"{kind}.parquet" for kind in ("pipe", "socket", "loop", "dangling", "file")}
    os.mkfifo(made["pipe"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(made["socket"]))
    made["loop"].symlink_to(made["loop"])
    made["dangling"].symlink_to(tmp_path / "gone")
    made["file"].write_text("a")
    told = {"pipe": "a named pipe", "socket": "a socket", "loop": "leads back to itself", "dangling": "does not exist"}
    for kind, expected in told.items():
        assert expected in fs.unreadable_kind(made[kind])
        with pytest.raises(DataError, match=expected):
            read_parquet(str(made[kind]))
        with pytest.raises(OSError, match=expected):
            fs.readable_file(made[kind])
    assert "a device" in fs.unreadable_kind("/dev/zero") and "no path" in fs.unreadable_kind("a\0b")
    assert fs.unreadable_kind(made["file"]) is fs.unreadable_kind(tmp_path) is fs.unreadable_kind("/nowhere") is None


def test_a_folder_matches_its_record_until_it_changes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"123")
    record = fs._record_directory_structure(tmp_path)
    assert os.path.dirname(record) == str(tmp_path) and fs._check_directory_structure(tmp_path, record)
    (tmp_path / "new.txt").touch()
    assert not fs._check_directory_structure(tmp_path, record)
    assert not fs._check_directory_structure(tmp_path, tmp_path / "no_record")


def test_a_copier_put_in_the_place_of_the_module_s_own_is_used(tmp_path, monkeypatch):
    calls = []

    def copier(src, dst):
        calls.append(src)
        with open(dst, "w") as file:
            file.write("x")

    monkeypatch.setattr(fs, "copy", copier)
    remote = "hdfs://test/path/file.txt"
    local = fs.copy_to_local(remote, cache_dir=tmp_path / "cache")
    assert local == os.path.join(tmp_path / "cache", fs.md5_encode(remote), "file.txt") and os.path.isfile(local)
    for recopy, count in ((False, 1), (True, 2), (False, 2)):
        fs.copy_to_local(remote, cache_dir=tmp_path / "cache", always_recopy=recopy)
        assert len(calls) == count


def cached_pages(path):
    """Return how many pages of a file are in the file cache, and how many it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = -(-len(mapped) // mmap.PAGESIZE)
        cached = (ctypes.c_ubyte * pages)()
        found = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), cached)
        del start
    assert found == 0, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in cached), pages


def evict(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_weights_are_read_ahead(tmp_path, monkeypatch):
    weights, other = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "optimizer.pt"
    for path in (weights, other):
        path.write_bytes(bytes(9 << 20))
        evict(path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x")
    if cached_pages(weights)[0]:
        pytest.skip("this file system keeps its pages in memory")
    monkeypatch.setattr(fs.psutil, "virtual_memory", lambda: SimpleNamespace(available=17 << 20))
    fs.read_ahead(str(tmp_path)).join()
    assert cached_pages(weights)[0] == 0, "half of the memory is for others"
    monkeypatch.undo()
    fs.read_ahead(str(tmp_path)).join()
    found, pages = cached_pages(weights)
    assert found == pages and cached_pages(other)[0] == 0


def test_folders_that_cannot_be_read_ahead(tmp_path, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    for folder in (tmp_path, tmp_path / "absent", "hdfs://host/model"):
        fs.read_ahead(str(folder)).join()  # whoever loads the model says what is wrong
    assert raised == []


def test_an_inner_block_that_a_time_limit_cut_off_holds_nothing() -> None:
    """The thread's second entry is never left, as if an interrupt came on its way out."""
    tokenizer: Any = type("Tokenizer", (), {})()
    cut_off = []

    def interrupted() -> None:
        with one_thread(tokenizer):
            inner = one_thread(tokenizer)
            inner.__enter__()
            cut_off.append(inner)

    first = threading.Thread(target=interrupted)
    first.start()
    first.join()
    others_turn = threading.Event()

    def other() -> None:
        with one_thread(tokenizer):
            others_turn.set()

    threading.Thread(target=other, daemon=True).start()
    assert others_turn.wait(60)
