"""Checkpoints of FSDP2 and plain modules: one file per rank and part."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from verl.errors import CheckpointError
from verl.utils.checkpoint import files
from verl.utils.checkpoint.checkpoint_manager import HF_FOLDER, BaseCheckpointManager
from verl.utils.checkpoint.hf_export import export_weights, save_config_and_tokenizer
from verl.utils.checkpoint.model_fields import forward_fields
from verl.utils.checkpoint.optimizer_settings import (
    CONFIGURED_KEY,
    SCHEDULE_KEY,
    Settings,
    apply_settings,
    follow_schedule,
    saved_settings,
    settings_of,
    warn_of_changes,
)
from verl.utils.device import get_device_name
from verl.utils.faults import fault_point
from verl.utils.json_types import JsonObject
from verl.utils.loading import State, load_tensors, not_finite
from verl.utils.numerics.lr_schedules import schedule_factor

logger = logging.getLogger(__name__)

NamedWeights = Iterator[tuple[str, Tensor]]
PREFIXED_KEY = "prefixed"
"""Entry of a layout file: the source's tensors have names with prefixes that the model in memory lacks."""
_PART_OF_CONTENT = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


def part_name(content: str, world_size: int, rank: int) -> str:
    """Return the file that holds a rank's ``model``, ``optimizer`` or ``extra``."""
    return f"{_PART_OF_CONTENT[content]}_world_size_{world_size}_rank_{rank}.pt"


class FSDPCheckpointManager(BaseCheckpointManager):
    """Write and read the shards of this rank; every rank calls it, with the same arguments.

    Parameters are restored in place, on their current device: an offloaded model may stay offloaded.
    """

    model: nn.Module

    def __post_init__(self, checkpoint_config: Mapping[str, Any] | None) -> None:
        super().__post_init__(checkpoint_config)
        self.settings = [] if self.optimizer is None else settings_of(self.optimizer.param_groups)

    def model_fields(self) -> JsonObject:
        """Return the values of the model's configuration that its forward reads, by dotted name."""
        return forward_fields(self.model, getattr(self.model, "config", None))

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        named_weights: NamedWeights | None = None,
        shared_folders: Mapping[str, Callable[[Path | None], None]] | None = None,
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
        files.make_folder(folder)
        # A manifest of an earlier save in this folder would make a half-written checkpoint look complete, so all
        # manifests go before any rank writes.
        files.remove_stale_files(folder, self.world_size, self.rank)
        self.barrier()
        records = [self._write_part(folder, "model", self.model.state_dict)] if self.should_save_model else []
        fault_point("save_checkpoint", rank=self.rank, step=global_step)
        if self.should_save_optimizer and self.optimizer is not None:
            records.append(self._write_part(folder, "optimizer", self._optimizer_state))
        if self.should_save_extra:
            records.append(self._write_part(folder, "extra", self._extra_state))
        if self.rank == 0:
            text = json.dumps({"FSDP_version": 2} | self.layout_fields(), indent=4)
            records.append(files.write_text(folder, files.LAYOUT_NAME, text))

        def write_model(unfinished: Path | None) -> None:
            if unfinished is not None:
                config = getattr(self.model, "config", None)
                dtype = config.dtype if config is not None and self.should_save_hf_model else None
                save_config_and_tokenizer(
                    unfinished, self.model, self.processing_class, self.source_files, config, dtype
                )
            if self.should_save_hf_model:
                export_weights(unfinished, named_weights or self._full_tensors(), self.weights_mode())

        for name, write in {HF_FOLDER: write_model, **(shared_folders or {})}.items():
            records += self.write_shared_folder(folder, name, write)
        self.complete(local_path, hdfs_path, global_step, records, max_ckpt_to_keep)

    def _write_part(self, folder: Path, content: str, state: Callable[[], State]) -> files.FileRecord:
        name = part_name(content, self.world_size, self.rank)
        return files.write_file(folder, name, lambda file: torch.save(state(), file))

    def _optimizer_state(self) -> State:
        assert self.optimizer is not None
        return {**self.optimizer.state_dict(), CONFIGURED_KEY: self.settings}

    def _extra_state(self) -> State:
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        return {"lr_scheduler": schedule, SCHEDULE_KEY: self.schedule, "rng": self.get_rng_state()}

    def _full_tensors(self) -> NamedWeights:
        """Gather the state dict one tensor at a time, tied tensors once."""
        seen: set[int] = set()
        for name, value in self.model.state_dict().items():
            # Tied tensors share their memory. FSDP keeps one shard of both, so the address of the shard tells.
            first = _local(value).data_ptr()  # the tensor's address: tensors may share a storage
            if first in seen and value.numel():
                continue
            seen.add(first)
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    # ---- loading

    def _load(self, folder: Path, local_path: str) -> None:
        """Restore the parts of this rank.

        All ranks read and check all their files before the first change, so that a broken file on one rank leaves the
        models of all ranks as they were.
        """
        self.stop_on(local_path, self._problems(folder))
        weights: list[tuple[Tensor, Tensor]] = []
        states: dict[str, State] = {}
        problems: list[str] = []
        for content in (part for part in _PART_OF_CONTENT if part in self.load_contents):
            try:
                name = part_name(content, self.world_size, self.rank)
                state = load_tensors(folder / name)
                if content == "model":
                    weights = _matched(name, self.model.state_dict(), state)
                elif content == "optimizer" and self.optimizer is not None:
                    state = _matched_optimizer(name, self.optimizer, state)
                states[content] = state
            except CheckpointError as error:
                problems.append(str(error))
        self.stop_on(local_path, problems)
        # From here on every rank has checked all its files: nothing below is expected to fail on one rank only.
        with torch.no_grad():
            for value, saved in weights:
                _local(value).copy_(saved)
        if "optimizer" in states and self.optimizer is not None:
            self.optimizer.load_state_dict(states["optimizer"])
            self._settle(local_path, saved_settings(states["optimizer"]))
        if "extra" in states:
            self._load_extra(local_path, states["extra"])

    def _settle(self, local_path: str, saved: list[Settings]) -> None:
        """Choose between the loaded settings of the checkpoint and those of this run."""
        assert self.optimizer is not None
        if self.rank == 0:
            warn_of_changes(local_path, saved, self.settings, self.keeps_settings)
        if self.keeps_settings:
            self.settings = saved
        else:
            apply_settings(self.optimizer.param_groups, saved, self.settings)

    def _settle_schedule(self, local_path: str, saved: Settings) -> None:
        """Choose between the schedule of the checkpoint and the present one of this run."""
        assert self.schedule is not None and isinstance(self.lr_scheduler, LambdaLR)
        if self.rank == 0:
            warn_of_changes(local_path, [saved], [self.schedule], self.keeps_settings)
        if self.keeps_settings:
            self.schedule = saved
            self.lr_scheduler.lr_lambdas = [schedule_factor(saved)] * len(self.lr_scheduler.lr_lambdas)

    def _problems(self, folder: Path) -> list[str]:
        """Return the reasons why this rank cannot load its files."""
        if not folder.is_dir():
            return [f"the folder {folder} does not exist"]
        try:
            problem = files.backend_problem(folder, "fsdp") or files.world_size_problem(folder, self.world_size)
            if problem is None and self.should_load_model:
                problem = self.other_model(folder)
            if problem is not None:
                return [problem]
            manifest = files.read_manifest(folder, self.world_size, self.rank)
        except CheckpointError as error:
            return [str(error)]
        listed = {record.name for record in manifest.files}
        wanted = [part_name(c, self.world_size, self.rank) for c in self.load_contents if c in _PART_OF_CONTENT]
        absent = [name for name in wanted if name not in listed]
        if absent:
            return [f"{', '.join(absent)} was never saved: leave that part out of checkpoint.load_contents"]
        needed = [record for record in manifest.files if record.name in wanted or record.name == files.LAYOUT_NAME]
        return list(files.file_problems(folder, replace(manifest, files=needed), checksums=True))

    def _load_extra(self, local_path: str, state: State) -> None:
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            if state.get(SCHEDULE_KEY) is not None and self.schedule is not None:  # older checkpoints do not name it
                self._settle_schedule(local_path, state[SCHEDULE_KEY])
            if isinstance(self.lr_scheduler, LRScheduler) and self.optimizer is not None:
                follow_schedule(self.optimizer, self.lr_scheduler)
        if get_device_name() not in state["rng"]:
            logger.warning("the checkpoint has no random state for %s: this process keeps its own", get_device_name())
        self.load_rng_state(state["rng"])


def _local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _placements(value: Tensor) -> tuple[Placement, ...] | None:
    """Return how a tensor is placed on the ranks; None if a rank has all of it."""
    return value.placements if isinstance(value, DTensor) and value.device_mesh.size() > 1 else None


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

    Raises: CheckpointError unless it has the shape and sharding of the live tensor, and finite values where that has.
    """
    if live.shape != saved.shape:
        raise CheckpointError(
            f"{file} belongs to another model: {key} has shape {tuple(saved.shape)} there and {tuple(live.shape)} here"
        )
    there, here = (_placements(tensor) for tensor in (saved, live))
    if there != here or _local(live).shape != _local(saved).shape:
        raise CheckpointError(
            f"{file} shards {key} by {there}, this run by {here}: set fsdp_config.fsdp_size to its value at the save"
        )
    found = not_finite(_local(saved))
    # A buffer may hold an attention mask with infinities, which are then in the model as well.
    if found and not torch.equal(_local(live).isfinite().cpu(), _local(saved).isfinite().cpu()):
        raise CheckpointError(
            f"{file} holds {found} in {key}: training had diverged before this save; use an earlier checkpoint"
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
    # torch's state has numbers instead of names: parameters in the order of the groups, which save and load share.
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
    if not isinstance(value, Tensor) or not (isinstance(param, DTensor) or isinstance(value, DTensor)):
        return value
    if value.shape != param.shape and not isinstance(value, DTensor):  # the number of steps
        return value
    local = _same_layout(file, key, param, value).to(_local(param).device)
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
