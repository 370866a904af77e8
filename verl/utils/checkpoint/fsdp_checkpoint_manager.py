"""Checkpoints of FSDP2 and plain modules: one file per rank and part."""

import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.utils import hdfs_io
from verl.utils.checkpoint.checkpoint_manager import HF_FOLDER, BaseCheckpointManager, State
from verl.utils.checkpoint.files import (
    LAYOUT_NAME,
    CheckpointError,
    FileRecord,
    Manifest,
    backend_problem,
    file_problems,
    move_files,
    read_manifest,
    remove_checkpoint,
    remove_stale_files,
    temporary_folder,
    world_size_problem,
    write_file,
)
from verl.utils.checkpoint.hf_export import export_weights, save_config_and_tokenizer
from verl.utils.device import get_device_name
from verl.utils.faults import fault_point
from verl.utils.fs import copy_to_local

logger = logging.getLogger(__name__)

NamedWeights = Iterator[tuple[str, Tensor]]
SharedFolders = Mapping[str, Callable[[Path | None], None]]
_PART_OF_CONTENT = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


def part_name(content: str, world_size: int, rank: int) -> str:
    """Return the file that holds a rank's ``model``, ``optimizer`` or ``extra``."""
    return f"{_PART_OF_CONTENT[content]}_world_size_{world_size}_rank_{rank}.pt"


class FSDPCheckpointManager(BaseCheckpointManager):
    """Write and read the shards of this rank; every rank calls it, with the same arguments.

    Parameters are restored in place, on their current device: an offloaded model may stay offloaded.
    """

    model: nn.Module

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        named_weights: NamedWeights | None = None,
        shared_folders: SharedFolders | None = None,
    ) -> None:
        """Write this rank's files, then its manifest; remove older checkpoints once all ranks have done so.

        Args:
            hdfs_path: the complete checkpoint is copied there as well.
            max_ckpt_to_keep: complete checkpoints to leave on disk, including this one; None keeps all.
            named_weights: (checkpoint name, full tensor) pairs for ``hf_model``, drained by every rank; the default
                gathers the state dict.
            shared_folders: folders that the checkpoint holds once, each with its writer; every rank calls the
                writer, rank 0 with a folder and the others with None.
        Raises: ValueError when ``save_contents`` lists a part that this manager was not given.
        """
        folder = Path(local_path)
        self.check_parts("save_contents")
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_files(folder, self.world_size, self.rank)
        self.barrier()
        records = [self._write_part(folder, "model", self.model.state_dict)] if self.should_save_model else []
        fault_point("save_checkpoint", rank=self.rank, step=global_step)
        if self.should_save_optimizer and self.optimizer is not None:
            records.append(self._write_part(folder, "optimizer", self.optimizer.state_dict))
        if self.should_save_extra:
            records.append(self._write_part(folder, "extra", self._extra_state))
        records += self._write_shared_files(folder, named_weights)
        for name, write in (shared_folders or {}).items():
            records += self._write_shared_folder(folder, name, write)
        self.complete(local_path, hdfs_path, global_step, records, max_ckpt_to_keep)

    def _write_part(self, folder: Path, content: str, state: Callable[[], State]) -> FileRecord:
        name = part_name(content, self.world_size, self.rank)
        return write_file(folder, name, lambda file: torch.save(state(), file))

    def _extra_state(self) -> State:
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        return {"lr_scheduler": schedule, "rng": self.get_rng_state()}

    def _write_shared_files(self, folder: Path, named_weights: NamedWeights | None) -> list[FileRecord]:
        """Write the files that the checkpoint holds once, on rank 0; all ranks gather the weights."""
        records: list[FileRecord] = []
        if self.rank != 0:
            if self.should_save_hf_model:
                export_weights(None, named_weights or self._full_tensors())
            return records
        layout = {"FSDP_version": 2} | self.layout_fields()
        text = json.dumps(layout, indent=4).encode()
        records.append(write_file(folder, LAYOUT_NAME, lambda file: file.write(text)))
        with temporary_folder(folder, HF_FOLDER) as unfinished:
            save_config_and_tokenizer(unfinished, self.model, self.processing_class)
            if self.should_save_hf_model:
                export_weights(unfinished, named_weights or self._full_tensors())
            records += move_files(unfinished, folder, HF_FOLDER)
        return records

    def _write_shared_folder(self, folder: Path, name: str, write: Callable[[Path | None], None]) -> list[FileRecord]:
        if self.rank != 0:
            write(None)
            return []
        with temporary_folder(folder, name) as unfinished:
            write(unfinished)
            return move_files(unfinished, folder, name)

    def _full_tensors(self) -> NamedWeights:
        """Gather the state dict one tensor at a time, tied tensors once."""
        seen: set[int] = set()
        for name, value in self.model.state_dict().items():
            storage = _local(value).untyped_storage().data_ptr()
            if storage in seen and value.numel():
                continue
            seen.add(storage)
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    # ---- loading

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore the parts in ``load_contents``.

        All ranks read and check all their files before the first change, so that a broken file on one rank leaves the
        models of all ranks as they were.

        Raises: CheckpointError, a ValueError, naming the file, the problem, and what to do.
        """
        self.check_parts("load_contents")
        path = self.checkpath(local_path, hdfs_path)
        folder = Path(copy_to_local(path) if hdfs_io.is_hdfs(path) else path)
        self.stop_on(local_path, self._problems(folder))
        weights: list[tuple[Tensor, Tensor]] = []
        states: dict[str, State] = {}
        problems: list[str] = []
        for content in ("model", "optimizer", "extra"):
            if content in self.load_contents:
                try:
                    state = self._read_part(folder, content)
                    name = part_name(content, self.world_size, self.rank)
                    if content == "model":
                        weights = _matched(name, self.model.state_dict(), state)
                    elif content == "optimizer":
                        assert self.optimizer is not None
                        state = _matched_optimizer(name, self.optimizer, state)
                    states[content] = state
                except CheckpointError as error:
                    problems.append(str(error))
        self.stop_on(local_path, problems)
        with torch.no_grad():
            for value, saved in weights:
                _local(value).copy_(saved)
        if "optimizer" in states:
            assert self.optimizer is not None
            self.optimizer.load_state_dict(states["optimizer"])
        if "extra" in states:
            self._load_extra(states["extra"])
        self.barrier()
        if del_local_after_load and self.is_node_leader():
            remove_checkpoint(folder)

    def _problems(self, folder: Path) -> list[str]:
        """Return the reasons why this rank cannot load its files."""
        if not folder.is_dir():
            return [f"the folder {folder} does not exist"]
        try:
            problem = backend_problem(folder, "fsdp") or world_size_problem(folder, self.world_size)
            if problem is not None:
                return [problem]
            manifest = read_manifest(folder, self.world_size, self.rank)
        except CheckpointError as error:
            return [str(error)]
        listed = {record.name for record in manifest.files}
        wanted = [part_name(c, self.world_size, self.rank) for c in self.load_contents if c in _PART_OF_CONTENT]
        absent = [name for name in wanted if name not in listed]
        if absent:
            return [f"{', '.join(absent)} was never saved: leave that part out of checkpoint.load_contents"]
        needed = [record for record in manifest.files if record.name in wanted or record.name == LAYOUT_NAME]
        return list(
            file_problems(folder, Manifest(self.world_size, self.rank, manifest.global_step, needed), checksums=True)
        )

    def _read_part(self, folder: Path, content: str) -> State:
        """Read a file of this rank; it can hold only tensors and plain containers, so that it cannot run code."""
        name = part_name(content, self.world_size, self.rank)
        try:
            with _quiet_device_mesh():
                return torch.load(folder / name, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise CheckpointError(f"{name} cannot be read ({error})") from error

    def _load_extra(self, state: State) -> None:
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if get_device_name() not in state["rng"]:
            logger.warning("the checkpoint has no random state for %s: this process keeps its own", get_device_name())
        self.load_rng_state(state["rng"])


def _local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _matched(name: str, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair every live tensor with the saved tensor of the same name.

    Raises: CheckpointError when names, shapes or shardings differ.
    """
    missing = live.keys() - saved.keys()
    unexpected = saved.keys() - live.keys()
    if missing or unexpected:
        lacking = f"lacks {len(missing)} tensors, such as {min(missing)}" if missing else ""
        extra = f"has {len(unexpected)} others, such as {min(unexpected)}" if unexpected else ""
        both = " and ".join(filter(None, (lacking, extra)))
        raise CheckpointError(f"{name} belongs to another model: it {both}")
    return [(value, _same_layout(name, key, value, saved[key])) for key, value in live.items()]


def _same_layout(file: str, key: str, live: Tensor, saved: Tensor) -> Tensor:
    """Return this rank's part of a saved tensor.

    Raises: CheckpointError unless it has the shape and sharding of the live tensor.
    """
    if live.shape != saved.shape:
        raise CheckpointError(
            f"{file} belongs to another model: {key} has shape {tuple(saved.shape)} there and {tuple(live.shape)} here"
        )
    there, here = (getattr(tensor, "placements", None) for tensor in (saved, live))
    if there != here or _local(live).shape != _local(saved).shape:
        raise CheckpointError(
            f"{file} shards {key} by {there}, this run by {here}: set fsdp_config.fsdp_size to its value at the save"
        )
    return _local(saved)


def _matched_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: State) -> State:
    """Return the saved state with its tensors on the meshes of the live parameters.

    An unpickled DTensor has a mesh without process groups, so its local part is put on the live parameter's mesh.

    Raises: CheckpointError when the state belongs to other parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{name} belongs to another optimizer: groups of {sizes[0]} parameters there, {sizes[1]} here"
        )
    order = [index for group in saved["param_groups"] for index in group["params"]]
    state = {}
    for index, param in zip(order, params, strict=True):
        if index in saved["state"]:
            state[index] = {
                key: _on_mesh_of(param, name, f"{key} of parameter {index}", value)
                for key, value in saved["state"][index].items()
            }
    return {**saved, "state": state}


def _on_mesh_of(param: Tensor, file: str, key: str, value: Tensor | float) -> Tensor | float:
    if not isinstance(param, DTensor) or not isinstance(value, DTensor):
        return value
    local = _same_layout(file, key, param, value).to(param.to_local().device)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@contextmanager
def _quiet_device_mesh() -> Iterator[None]:
    """Silence the warning that an unpickled mesh has no process groups: the mesh is dropped at once."""
    mesh_logger = logging.getLogger("torch.distributed.device_mesh")
    level = mesh_logger.level
    mesh_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        mesh_logger.setLevel(level)
