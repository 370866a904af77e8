"""Atomic checkpoint folders: files, manifests and the tracker. Needs no torch.

A job may die at any moment of a save, and a half-written folder must never be taken for a checkpoint. Three rules give
that. A file is written under a temporary name, flushed to disk, and renamed: it exists whole or not at all. Each rank
writes ``manifest_world_size_<W>_rank_<r>.json`` last, with the size and checksum of its files; a folder is complete
when the manifests of all ranks and their files are there. The tracker, which names the latest checkpoint, is written
after every manifest. A save into an existing folder, and a removal, delete manifests first.
"""

import fcntl
import functools
import glob
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from verl.errors import CheckpointError
from verl.utils import envs
from verl.utils.fs import readable_file

logger = logging.getLogger(__name__)

DEFAULT_CONTENTS = ("model", "optimizer", "extra")
CONTENTS = (*DEFAULT_CONTENTS, "hf_model")
"""The parts of a checkpoint."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
LAYOUT_NAME = "fsdp_config.json"
MEGATRON_LAYOUT_NAME = "megatron_config.json"
LAYOUT_NAMES = (LAYOUT_NAME, MEGATRON_LAYOUT_NAME)
HF_FOLDER = "huggingface"
ADAPTER_FOLDER = "lora_adapter"
TENSORS_FOLDER = "dist_ckpt"
"""Of Megatron-Core."""
STEP_FOLDER = "global_step_"
"""Name of the folder of a checkpoint, before its step."""
UNFINISHED = ".verl.tmp"
"""End of the name of a file that is being written; its process holds a lock on it."""
DATA_GLOB = "data*.pt"
_ESI_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
_CHECKSUM_LIMIT_BYTES = 1 << 30
_READ_BYTES = 1 << 20
_STEP_DIGITS = 18
_MOST_RANKS = 1 << 16
_RANK_FILE = re.compile(r"_world_size_(\d+)_rank_(\d+)\.(?:pt|json)$")

StrPath = str | os.PathLike[str]


# ---- files


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its name relative to the folder, its size and the CRC-32 of its content."""

    name: str
    num_bytes: int
    crc32: int


class _Summing:
    """A binary file that counts and checksums its content and remembers a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        self.num_bytes += len(content)
        try:
            return self._file.write(content)
        except OSError as error:  # torch.save raises another error in its place
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def sync_folder(folder: StrPath) -> None:
    """Flush the folder entry to disk, so that renames survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(folder: StrPath, name: str, write: Callable[[BinaryIO], object]) -> FileRecord:
    """Let ``write`` fill a file, and name the file once its whole content is on disk.

    Raises: OSError naming the file when the disk is full.
    """
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            summing = _Summing(file)
            write(summing)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        _put(unfinished, path)
    except (OSError, RuntimeError) as error:
        reason = error if isinstance(error, OSError) else summing.error
        if reason is None:
            raise
        hint = "free disk space or set trainer.default_local_dir to another disk"
        raise OSError(reason.errno, f"{reason.strerror}: {hint}", str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
    return FileRecord(name, summing.num_bytes, summing.crc32)


def write_text(folder: StrPath, name: str, text: str) -> FileRecord:
    """Write a small file of text, whole or not at all."""
    return write_file(folder, name, lambda file: file.write(text.encode()))


def record_file(folder: StrPath, name: str) -> FileRecord:
    """Flush a file that another library wrote to disk, and return its record."""
    path = Path(folder, name)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(name, path.stat().st_size, _crc32(path))


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


# ---- manifests


@dataclass(frozen=True)
class Manifest:
    """The files that one rank has written."""

    world_size: int
    rank: int
    global_step: int
    files: list[FileRecord] = field(default_factory=list)

    def write(self, folder: StrPath) -> None:
        """Write the manifest, which completes this rank's part of the checkpoint."""
        text = json.dumps({"format": 1, **asdict(self)}, indent=1)
        write_text(folder, manifest_name(self.world_size, self.rank), text)


@contextmanager
def reading(name: StrPath, hint: str = "") -> Iterator[None]:
    """Raise CheckpointErrors that name a JSON file, if it is missing or lacks an entry that the block reads."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing{hint}") from None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read ({error})") from error


def manifest_name(world_size: int, rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest_world_size_{world_size}_rank_{rank}.json"


def read_manifest(folder: StrPath, world_size: int, rank: int) -> Manifest:
    """Read a rank's manifest.

    Raises: CheckpointError naming the file when it is missing or truncated.
    """
    name = manifest_name(world_size, rank)
    with reading(name, f": rank {rank} did not finish writing"):
        content = json.loads(Path(readable_file(Path(folder, name))).read_text(encoding="utf-8"))
        files = [FileRecord(**entry) for entry in content["files"]]
        if type(content["global_step"]) is not int or not all(isinstance(record.name, str) for record in files):
            raise ValueError("global_step must be an integer, and the name of each file a text")
        if (content["world_size"], content["rank"]) != (world_size, rank):
            raise ValueError(
                f"it is the manifest of rank {content['rank']} of {content['world_size']}, "
                f"not of rank {rank} of {world_size}"
            )
        return Manifest(content["world_size"], content["rank"], content["global_step"], files)


def read_manifests(folder: StrPath, world_size: int) -> tuple[list[Manifest], list[str]]:
    """Return the manifests of all ranks, and the problems of missing, damaged or mixed ones."""
    manifests = []
    problems = []
    for rank in range(world_size):
        try:
            manifests.append(read_manifest(folder, world_size, rank))
        except CheckpointError as error:
            problems.append(str(error))
    steps = {manifest.global_step for manifest in manifests}
    if len(steps) > 1:
        problems.append(f"its ranks hold different steps, {sorted(steps)}: a save was interrupted")
    return manifests, problems


def layout_file(folder: StrPath) -> Path:
    """Return the layout file of the engine that wrote a checkpoint."""
    return next((path for name in LAYOUT_NAMES if (path := Path(folder, name)).exists()), Path(folder, LAYOUT_NAME))


def read_world_size(folder: StrPath) -> int:
    """Return how many ranks wrote a checkpoint.

    Raises: CheckpointError when its layout file is missing or truncated.
    """
    path = layout_file(folder)
    with reading(path.name):
        world_size = json.loads(Path(readable_file(path)).read_text(encoding="utf-8"))["world_size"]
        if type(world_size) is not int or not 0 < world_size <= _MOST_RANKS:
            raise ValueError(f"world_size={world_size!r} must be an integer of 1 or more")
        return world_size


def backend_problem(folder: StrPath, strategy: str) -> str | None:
    """Return why engines of a strategy cannot read a checkpoint; None if they can, or if its writer is unknown."""
    written = {LAYOUT_NAME: "fsdp", MEGATRON_LAYOUT_NAME: "megatron"}.get(layout_file(folder).name)
    if not layout_file(folder).exists() or strategy.startswith(str(written)):
        return None
    return (
        f"strategy={written} wrote it: resume with that strategy, or start a new run from its weights, which "
        f"`python -m verl.model_merger merge --backend {written} --local_dir {folder} --target_dir <folder>` writes to "
        "a folder for model.path"
    )


def world_size_problem(folder: StrPath, world_size: int) -> str | None:
    """Return why ``world_size`` ranks cannot read a checkpoint; None if they can.

    Any number of ranks can read a Megatron checkpoint.

    Raises: CheckpointError when ``fsdp_config.json`` is missing or truncated.
    """
    saved = read_world_size(folder)
    if saved == world_size or layout_file(folder).name == MEGATRON_LAYOUT_NAME:
        return None
    return (
        f"it was written by {saved} ranks and cannot be read by {world_size}: start with {saved} "
        "(trainer.nnodes times trainer.n_gpus_per_node), or start a new run from its weights, which "
        f"`python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir <folder>` writes to a "
        "folder for model.path"
    )


def file_problems(folder: StrPath, manifest: Manifest, checksums: bool) -> Iterator[str]:
    """Yield the problems of one rank's files."""
    for record in manifest.files:
        path = Path(folder, record.name)
        if not path.is_file():
            yield f"{record.name} is missing"
        elif (size := path.stat().st_size) != record.num_bytes:
            yield f"{record.name} has {size} bytes instead of {record.num_bytes}: it was truncated or changed"
        elif checksums and _crc32(path) != record.crc32:
            yield f"{record.name} has the right size but the wrong content (checksum)"


def archive_problem(path: StrPath) -> str | None:
    """Check a file of ``torch.save`` without torch; return the problem, or None."""
    try:
        with zipfile.ZipFile(readable_file(path)) as archive:
            changed = archive.testzip()
    except (zipfile.BadZipFile, OSError):
        return "is truncated or not a file of torch.save"
    return None if changed is None else "has the wrong content (checksum)"


def verify_checkpoint(path: StrPath, checksums: bool | None = None) -> list[str]:
    """Return the missing, truncated or changed files in the folder of one role; an empty list if it is complete.

    ``checksums`` reads every file; the default does so for folders of less than 1 GiB. Ranks always check the content
    of the files that they load.
    """
    if not Path(path).is_dir():
        return [f"the folder {path} does not exist"]
    try:
        world_size = read_world_size(path)
    except CheckpointError as error:
        return [str(error)]
    manifests, problems = read_manifests(path, world_size)
    if checksums is None:
        checksums = sum(record.num_bytes for m in manifests for record in m.files) < _CHECKSUM_LIMIT_BYTES
    for manifest in manifests:
        problems += file_problems(path, manifest, checksums)
    return problems


def renamed_problem(step_folder: StrPath, role_folder: StrPath) -> str | None:
    """Return how the step in a folder's name differs from the one that its ranks saved; None if it does not.

    The saved step is 0 if the caller of the save gave none.
    """
    named = step_in_name(step_folder)
    world_size = read_world_size(role_folder) if layout_file(role_folder).exists() else 0
    saved = {manifest.global_step for manifest in read_manifests(role_folder, world_size)[0]} - {0, named}
    if not saved:
        return None
    return f"it was saved at step {min(saved)}, the folder's name says {named}: give the folder its name back"


def remove_stale_files(folder: StrPath, world_size: int, rank: int, layout_name: str = LAYOUT_NAME) -> None:
    """Remove this rank's manifest from an earlier save into the same folder, before its files are overwritten.

    Rank 0 also removes leftovers of an interrupted save or of another world size, and adapters and tensors of
    Megatron-Core, which the save need not have. No rank may write yet.
    """
    _remove_file(Path(folder, manifest_name(world_size, rank)))
    if rank != 0:
        return
    for path in (Path(folder, name) for name in LAYOUT_NAMES if name != layout_name):  # left by another engine
        if path.is_dir():
            _set_aside(path, is_folder=True)
        _remove_file(path)
    for name in (ADAPTER_FOLDER, TENSORS_FOLDER):
        remove_folder(Path(folder, name))
    remove_unfinished(folder)
    for path in Path(folder).iterdir():
        found = _RANK_FILE.search(path.name)
        if found and int(found[1]) != world_size:
            _remove_file(path)


def _remove_file(path: Path) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):  # verl writes no folder under these names
        path.unlink()


# ---- step folders


def get_checkpoint_tracker_filename(root_path: StrPath) -> str:
    """Return the path of the file that names the latest checkpoint."""
    return os.path.join(root_path, TRACKER_NAME)


def write_tracker_atomically(root_path: StrPath, global_step: int) -> None:
    """Name a step as the latest checkpoint; a save does this last."""
    write_text(root_path, TRACKER_NAME, str(global_step))


def remove_tracker(root_path: StrPath) -> None:
    """Name no checkpoint as the latest."""
    tracker = Path(root_path, TRACKER_NAME)
    if tracker.is_symlink() or tracker.is_file():
        tracker.unlink()
        sync_folder(root_path)


def make_folder(folder: StrPath) -> None:
    """Make a folder. Rename a file or dangling link at its path or at the path of its step.

    Several processes may do so at once.
    """
    path = Path(folder)
    for place in (path.parent, path):
        if (place == path or step_in_name(place) is not None) and os.path.lexists(place) and not place.is_dir():
            _set_aside(place, is_folder=False)
    path.mkdir(parents=True, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder of an older save; a link that has its name is renamed."""
    if path.is_symlink():
        _set_aside(path, is_folder=False)
    shutil.rmtree(path, ignore_errors=True)


def _put(written: Path, path: Path) -> None:
    """Give a file its name; a folder that has the name is renamed."""
    if path.is_dir() and not path.is_symlink():
        _set_aside(path, is_folder=True)
    written.replace(path)


def _set_aside(path: Path, is_folder: bool) -> None:
    """Rename a foreign entry at the path of a checkpoint part; do nothing if another process has already done it."""
    # An empty file or folder takes the new name first, so that two processes never choose the same one. It also guards
    # a part that another process has written meanwhile: the system renames no file over a folder, and no folder over a
    # file.
    for number in itertools.count(1):
        free = path.with_name(f"{path.name}.aside.{number}")
        with suppress(FileExistsError):
            free.mkdir() if is_folder else free.touch(exist_ok=False)
            break
    try:
        path.rename(free)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        free.rmdir() if is_folder else free.unlink()
        return
    logger.warning("%s is not a part of a checkpoint but has the name of one: it was renamed to %s", path, free.name)


def step_in_name(folder: StrPath) -> int | None:
    """Return the step in the name of a checkpoint folder, None if the name holds none."""
    _, prefix, digits = Path(folder).name.rpartition(STEP_FOLDER)
    return as_step(digits) if prefix else None


def as_step(text: str) -> int | None:
    """Parse the number of a step; None if the text is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _STEP_DIGITS else None


def tracker_text(tracker: Path) -> str:
    """Return the content of a tracker file, with replacement characters for bytes that are not UTF-8.

    Raises: CheckpointError when the file cannot be read.
    """
    try:
        return Path(readable_file(tracker)).read_text(errors="replace", encoding="utf-8").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read ({error}): write a checkpoint's number into it") from error


def find_latest_ckpt_path(path: StrPath | None, directory_format: str = "global_step_{}") -> str | None:
    """Return the folder that the tracker file under ``path`` names; None if the file or folder is missing.

    Raises: CheckpointError when the tracker does not hold a number.
    """
    if path is None:
        return None
    tracker = Path(get_checkpoint_tracker_filename(path))
    if not os.path.lexists(tracker):
        return None
    text = tracker_text(tracker)
    step = as_step(text)
    if step is None:
        raise CheckpointError(f"{tracker} holds {text[:40]!r} instead of a step: write a checkpoint's number into it")
    folder = Path(path, directory_format.format(step))
    if not folder.is_dir():
        logger.warning("%s names step %s, but %s does not exist", tracker, text, folder)
        return None
    return str(folder)


def step_folders(root: StrPath, directory_format: str = "global_step_{}") -> list[tuple[int, Path]]:
    """List the checkpoint folders under ``root`` by ascending step."""
    prefix, suffix = directory_format.split("{}")
    pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
    found = ((pattern.fullmatch(path.name), path) for path in Path(root).glob("*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def find_complete_checkpoints(
    root: StrPath, directory_format: str = "global_step_{}", after_step: int = -1
) -> list[str]:
    """List the folders under ``root`` that a run can resume from, by ascending step; only folders of later steps.

    A folder is complete when every role in it is. With one sub-folder per role, the driver's ``data.pt``, which it
    writes after them, must be there too.
    """
    folders = step_folders(root, directory_format)
    return [str(folder) for step, folder in folders if step > after_step and is_complete(folder)]


def is_complete(folder: Path) -> bool:
    """Whether every role of a checkpoint is complete, and the state of the driver is there."""
    if layout_file(folder).exists():
        return not verify_checkpoint(folder)
    roles = [child for child in folder.iterdir() if child.is_dir()]
    return bool(roles) and any(folder.glob(DATA_GLOB)) and not any(verify_checkpoint(role) for role in roles)


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the rented capacity expires before another step and a save could end; times in seconds.

    The platform announces the expiry in an environment variable, in unix seconds. The result is False, with one
    warning, for an expiry that has passed or is not a number, and for a step that took no time.
    """
    for name in _ESI_VARIABLES:
        announced = envs.read(name)
        if announced is None:
            continue
        try:
            remaining = float(announced) - time.time()
        except ValueError:
            _warn_once(f"environment variable {name}={announced!r} is no time in unix seconds: no step is saved early")
            return False
        if not remaining > 0:
            _warn_once(f"environment variable {name}={announced} has passed: no step is saved early")
            return False
        if not max_steps_duration > 0:
            _warn_once("no step has been timed yet: none is saved early")
            return False
        return remaining <= save_ckpt_duration + max_steps_duration + redundant_time
    return False


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def remove_unfinished(folder: StrPath, name: str = "*") -> None:
    """Remove unfinished files and folders of killed processes from a folder, of any name or of one."""
    for left in Path(folder).glob(f".{name}.*{UNFINISHED}"):
        is_folder = left.is_dir() and not left.is_symlink()
        with suppress(OSError), _handle_of(left, os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_NONBLOCK) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True) if is_folder else left.unlink()


@contextmanager
def temporary_folder(folder: StrPath, name: str) -> Iterator[Path]:
    """Create a temporary folder in ``folder``, on the same disk as the final place of its files.

    Temporary folders of the same ``name`` that killed processes have left are removed.
    """
    remove_unfinished(folder, glob.escape(name))
    with (
        tempfile.TemporaryDirectory(UNFINISHED, f".{name}.", folder, ignore_cleanup_errors=True) as path,
        _handle_of(path, os.O_DIRECTORY) as handle,
    ):
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(path)


@contextmanager
def _handle_of(path: StrPath, flags: int) -> Iterator[int]:
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def move_files(source: Path, folder: StrPath, name: str) -> list[FileRecord]:
    """Flush the files of ``source`` to disk, move them into ``folder/name``, and return their records."""
    target = Path(folder, name)
    make_folder(target)
    records = []
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        relative = path.relative_to(source)
        record = record_file(source, str(relative))
        make_folder((target / relative).parent)
        _put(path, target / relative)
        records.append(FileRecord(f"{name}/{relative}", record.num_bytes, record.crc32))
    sync_folder(target)
    return records
