"""Checkpoints of Megatron-Core models in its torch_dist format.

Any parallel layout can read what another has written. Each rank describes its tensors as parts of global tensors,
under names that do not depend on the layout, and a load reads the parts that the new layout needs from whichever files
hold them. Random states are the exception: they belong to ranks.
"""

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.base_config import as_yaml
from verl.errors import CheckpointError
from verl.utils.checkpoint import files
from verl.utils.checkpoint.checkpoint_manager import HF_FOLDER, BaseCheckpointManager, way_out
from verl.utils.checkpoint.hf_export import export_weights, save_config_and_tokenizer
from verl.utils.checkpoint.model_fields import forward_fields
from verl.utils.checkpoint.optimizer_settings import Settings, warn_of_changes
from verl.utils.checkpoint.torch_dist import OPTIMIZER_KEYS, TENSORS_FOLDER, TorchDistReader, vocabulary_problem
from verl.utils.faults import fault_point
from verl.utils.json_types import JsonObject
from verl.utils.loading import State, load_tensors, not_finite
from verl.utils.megatron import dist_checkpointing

from megatron.core import parallel_state  # isort: skip  # after the import that prepares Megatron-Core for the CPU
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # isort: skip

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_CONFIG_NAME = "transformer_config.json"
_OPTIMIZER_KEY = "use_distributed_optimizer"
_UNSAVED = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Values that decide on the schedule and are not in the state that Megatron-Core makes of it."""


@dataclass
class _Save:
    """A checkpoint in progress, with the arguments for its completion."""

    local_path: str
    hdfs_path: str | None
    global_step: int
    max_ckpt_to_keep: int | None
    records: list[files.FileRecord]
    tensors: dist_checkpointing.PendingSave


class MegatronCheckpointManager(BaseCheckpointManager):
    """Write and read the parts of this rank; every rank calls it, with the same arguments.

    ``model`` holds the chunks of this rank. With ``checkpoint.async_save`` a save returns once this rank's tensors are
    copied to the host; the checkpoint is complete when ``finish_checkpoint`` returns True.
    """

    model: list[nn.Module]
    optimizer: "MegatronOptimizer | None"

    def __init__(self, model: list[nn.Module], hf_config: "PretrainedConfig", **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.hf_config = hf_config
        config = kwargs.get("checkpoint_config")
        self.is_async = bool(config is not None and config.async_save)
        self._running: _Save | None = None

    def model_fields(self) -> JsonObject:
        """Return the values of the model's configuration that its forward reads, by dotted name."""
        return forward_fields(None, self.hf_config)

    # ---- contents

    def _sharded(self, contents: list[str], is_loading: bool) -> State:
        """Describe the tensors of this rank as parts of global ones."""
        if "model" not in contents and "optimizer" not in contents:
            return {}
        state = dist_checkpointing.sharded_weights(self.model)
        if "optimizer" not in contents or self.optimizer is None:
            return state
        optimizer = self.optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=dict(dist_checkpointing.METADATA)
        )
        return ({} if "model" not in contents else state) | {"optimizer": optimizer}

    def _place(self) -> dict[str, int]:
        return {
            "world_size": self.world_size,
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "pp": parallel_state.get_pipeline_model_parallel_world_size(),
            "cp": parallel_state.get_context_parallel_world_size(),
            "ep": parallel_state.get_expert_model_parallel_world_size(),
        }

    def _sizes(self) -> dict[str, int]:
        return self._place() | {"etp": parallel_state.get_expert_tensor_parallel_world_size()}

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        named_weights: Iterator[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Write this rank's files, then its manifest; remove older checkpoints once all ranks have done so.

        A save in progress is finished first.

        Raises: ValueError when ``save_contents`` lists a part that this manager was not given; CheckpointError on all
        ranks when one of them could not write.
        """
        self.check_parts("save_contents")
        self.finish_checkpoint()
        folder = Path(local_path)
        files.make_folder(folder)
        files.remove_stale_files(folder, self.world_size, self.rank, files.MEGATRON_LAYOUT_NAME)
        if self.rank == 0:
            files.make_folder(folder / TENSORS_FOLDER)
        self.barrier()
        records = [self._write_random_state(folder)] if self.should_save_extra else []
        records += self._write_shared_files(folder, named_weights)
        state = self._sharded(self.save_contents, is_loading=False)
        if self.should_save_extra and self.lr_scheduler is not None:
            state["lr_scheduler"] = self._schedule_state()

        # Runs in the writer's thread once the files of this rank are complete, so that sizes and checksums are those
        # of the finished files.
        def record() -> None:
            fault_point("save_checkpoint", rank=self.rank, step=global_step)
            records.extend(self._tensor_files(folder, f"__{self.rank}_"))

        tensors = dist_checkpointing.save_dist_checkpointing(state, folder / TENSORS_FOLDER, self.is_async, record)
        self._running = _Save(local_path, hdfs_path, global_step, max_ckpt_to_keep, records, tensors)
        if not self.is_async:
            self.finish_checkpoint()

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete the save in progress; return whether none is left. Collective.

        Without ``wait`` it returns False while a rank still writes.

        Raises: CheckpointError on all ranks when one of them could not write.
        """
        save = self._running
        if save is None:
            return True
        # All ranks must take the same branch, because the steps below are collective: one rank that still writes holds
        # all.
        if not wait and self.agree([] if save.tensors.is_written else ["writing"]):
            return False
        # Forgotten first: a save that failed must not fail the next one again.
        self._running = None
        problem = save.tensors.wait()
        found = self.agree([] if problem is None else [problem])
        if found:
            raise CheckpointError(f"checkpoint {save.local_path} could not be written: {'; '.join(found[:4])}")
        save.tensors.finish()
        if self.rank == 0:
            save.records += self._tensor_files(Path(save.local_path), "")
        self.complete(save.local_path, save.hdfs_path, save.global_step, save.records, save.max_ckpt_to_keep)
        return True

    @staticmethod
    def _tensor_files(folder: Path, prefix: str) -> list[files.FileRecord]:
        """Return the records of one rank's tensor files or, without a prefix, of the files that all ranks share."""
        names = sorted(path.name for path in (folder / TENSORS_FOLDER).iterdir())
        mine = [name for name in names if (name.startswith(prefix) if prefix else not name.startswith("__"))]
        return [files.record_file(folder, f"{TENSORS_FOLDER}/{name}") for name in mine]

    def _random_state_name(self) -> str:
        return f"rng_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _write_random_state(self, folder: Path) -> files.FileRecord:
        state = {"layout": self._place(), "rng": self.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        return files.write_file(folder, self._random_state_name(), lambda file: torch.save(state, file))

    def _write_shared_files(
        self, folder: Path, named_weights: Iterator[tuple[str, Tensor]] | None
    ) -> list[files.FileRecord]:
        """Write the files that the checkpoint holds once, on rank 0; all ranks gather the weights."""
        records = []
        if self.rank == 0:
            layout = self._sizes() | self.layout_fields() | {_OPTIMIZER_KEY: self._is_sharded()}
            records.append(_write_json(folder, files.MEGATRON_LAYOUT_NAME, layout))
        if self.rank == 0 and self.should_save_extra:
            plain = (str, int, float, bool, list, type(None))
            fields = {key: value for key, value in vars(self.model[0].config).items() if isinstance(value, plain)}
            records.append(_write_json(folder, _CONFIG_NAME, fields))

        def write_model(unfinished: Path | None) -> None:
            config = copy.deepcopy(self.hf_config)
            dtype: torch.dtype | None = None
            if self.should_save_hf_model and named_weights is not None:
                own: Any = self.model[0].config
                config.dtype = dtype = own.params_dtype
                export_weights(unfinished, named_weights, self.weights_mode())
            if unfinished is not None:
                save_config_and_tokenizer(unfinished, None, self.processing_class, self.source_files, config, dtype)

        return records + self.write_shared_folder(folder, HF_FOLDER, write_model)

    # ---- loading

    def _load(self, folder: Path, local_path: str) -> None:
        """Restore the parts of this rank, whatever layout wrote them."""
        self.finish_checkpoint()
        # Each check is collective and comes before the first change to the model, so that all ranks go on or none does.
        self.stop_on(local_path, self._problems(folder) if self.rank == 0 else [])
        self.stop_on(local_path, self._changed_files(folder))
        wanted = self._sharded(self.load_contents, is_loading=True)
        self.stop_on(local_path, self._other_tensors(folder, wanted))
        try:
            state = dist_checkpointing.load_dist_checkpointing(wanted, folder / TENSORS_FOLDER)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {local_path} cannot be loaded: {error}. {way_out(local_path)}"
            ) from error
        self.stop_on(local_path, _not_finite(state, dist_checkpointing.chunk_names(self.model)))
        if self.should_load_model:
            for key, chunk in zip(dist_checkpointing.chunk_names(self.model), self.model, strict=True):
                chunk.load_state_dict(state[key])
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        # Loading replaces the groups' settings, so this run's are taken before.
        own = [{key: group[key] for key in ("max_lr", "min_lr", "betas", "eps") if key in group} for group in groups]
        if self.should_load_optimizer and self.optimizer is not None:
            self.optimizer.load_state_dict(_as_chained(state["optimizer"], self.optimizer))
        elif self.optimizer is not None and self.should_load_model:
            # The optimizer steps its own fp32 copies, which still hold the values from before the load.
            self.optimizer.reload_model_params()
        self._warn_of_changes(local_path, own, state.get("lr_scheduler") if self.should_load_extra else None)
        if self.should_load_extra:
            self._load_extra(folder, state.get("lr_scheduler"))
        self._follow_settings(own)

    def _problems(self, folder: Path) -> list[str]:
        """Return the reasons why this model cannot load a checkpoint on any rank."""
        if (problem := files.backend_problem(folder, "megatron")) is not None:
            return [problem]
        if problems := files.verify_checkpoint(folder, checksums=False):
            return problems
        if self.should_load_model and (problem := self.other_model(folder)) is not None:
            return [problem]
        if self.should_load_optimizer and (problem := self._other_optimizer(folder)) is not None:
            return [problem]
        if self.should_load_extra and not (folder / _CONFIG_NAME).is_file():
            return ["extra was never saved: leave that part out of checkpoint.load_contents"]
        return []

    def _other_optimizer(self, folder: Path) -> str | None:
        written = json.loads((folder / files.MEGATRON_LAYOUT_NAME).read_text(encoding="utf-8"))
        if written[_OPTIMIZER_KEY] != self._is_sharded():
            return f"it was written with megatron.{_OPTIMIZER_KEY}={as_yaml(written[_OPTIMIZER_KEY])}: set the same"
        cut = [sizes["ep"] > 1 or sizes.get("etp", sizes["tp"]) != sizes["tp"] for sizes in (written, self._sizes())]
        if cut[0] != cut[1] and not self._is_sharded():
            return (
                f"it was written with megatron.expert_model_parallel_size={written['ep']} and "
                f"expert_tensor_parallel_size={written.get('etp', written['tp'])}: without {_OPTIMIZER_KEY} the "
                "optimizer state of sharded experts cannot be read by unsharded ones, nor the reverse"
            )
        return None

    def _changed_files(self, folder: Path) -> list[str]:
        """Check the content of this rank's share of the files; the ranks share the reading."""
        saved = files.read_world_size(folder)
        manifests = [files.read_manifest(folder, saved, rank) for rank in range(self.rank, saved, self.world_size)]
        return [problem for each in manifests for problem in files.file_problems(folder, each, checksums=True)]

    def _other_tensors(self, folder: Path, wanted: State) -> list[str]:
        """Return the tensors that only the model or only the checkpoint has; collective."""
        names = [dist_checkpointing.tensor_names(wanted)] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(names, names[0])
        try:
            reader = TorchDistReader(folder / TENSORS_FOLDER)
        except CheckpointError as error:
            return [str(error)]
        if self.rank != 0:
            return []
        needed: set[str] = set().union(*names)
        found = reader.names()
        weights = {name for name in found if not name.startswith(OPTIMIZER_KEYS)}
        if lacking := sorted(needed - found):
            if weights == found and all(name.startswith(OPTIMIZER_KEYS) for name in lacking):
                return ["the optimizer was never saved: leave that part out of checkpoint.load_contents"]
            return [f"it belongs to another model: it lacks {lacking[0]}"]
        if self.should_load_model and (other := sorted(weights - needed)):
            return [f"it belongs to another model: it holds {other[0]}"]
        padding = json.loads((folder / files.MEGATRON_LAYOUT_NAME).read_text(encoding="utf-8"))["tp"]
        problem = vocabulary_problem(reader, self.hf_config.get_text_config().vocab_size, multiple=padding)
        return [] if problem is None else [problem]

    def _is_sharded(self) -> bool:
        return any(isinstance(each, DistributedOptimizer) for each in getattr(self.optimizer, "chained_optimizers", []))

    def _load_extra(self, folder: Path, schedule: State | None) -> None:
        if self.lr_scheduler is not None and schedule is not None:
            vars(self.lr_scheduler)["num_steps"] = 0  # load_state_dict adds the loaded steps
            self.lr_scheduler.load_state_dict(schedule)
            if self.keeps_settings:
                vars(self.lr_scheduler).update({name: schedule[name] for name in _UNSAVED if name in schedule})
        file = folder / self._random_state_name()
        state: State = load_tensors(file) if file.is_file() else {"layout": None}
        # The state of a rank has its meaning by the rank's place in the layout: tensor-parallel peers share one stream
        # of numbers and draw apart in another.
        if state["layout"] != self._place():
            logger.warning("%s was written by another parallel layout: this process keeps its random state", folder)
            return
        self.load_rng_state(state["rng"])
        get_cuda_rng_tracker().set_states(state["tracker"])

    def _warn_of_changes(self, local_path: str, own: Sequence[State], schedule: State | None) -> None:
        """Warn of settings that differ from the checkpoint, whose state is loaded except for the schedule."""
        if self.rank != 0 or self.optimizer is None:
            return
        pairs = [(group, mine) for group, mine in zip(self.optimizer.param_groups, own, strict=True) if "betas" in mine]
        saved = [_of_group(group) for group, _ in pairs]
        mine = [_of_group(each) for _, each in pairs]
        if schedule is not None and self.lr_scheduler is not None:
            saved.append(_of_schedule(schedule))
            mine.append(_of_schedule(self._schedule_state()))
        warn_of_changes(local_path, saved, mine, self.keeps_settings)

    def _schedule_state(self) -> State:
        """Return the state of the schedule, including the fields that Megatron-Core leaves out."""
        assert self.lr_scheduler is not None
        live = vars(self.lr_scheduler)
        return self.lr_scheduler.state_dict() | {name: live[name] for name in _UNSAVED if name in live}

    def _follow_settings(self, own: list[State]) -> None:
        """Set betas and learning-rate limits of the parameter groups, unless the checkpoint's are kept.

        The checkpoint restores the values that it was saved with. Megatron-Core would train with these and report the
        learning rate of the schedule. ``own`` are the values before the load.
        """
        if self.optimizer is None:
            return
        for group, mine in zip(self.optimizer.param_groups, own, strict=True):
            if not self.keeps_settings:
                group.update(mine)
            elif self.lr_scheduler is not None:
                group.update({name: vars(self.lr_scheduler)[name] for name in ("max_lr", "min_lr")})
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(0)  # type: ignore[attr-defined]


def _of_group(group: State) -> Settings:
    """Return the settings of a parameter group that do not follow a schedule: betas and eps."""
    return {"betas": tuple(group["betas"]), "override_optimizer_config.adam_eps": group["eps"]}


def _of_schedule(state: State) -> Settings:
    """Return the keys of ``optim`` that a schedule reads, of its state."""
    keys = {"max_lr": "lr", "end_wd": "weight_decay", "lr_warmup_steps": "lr_warmup_steps"}
    keys["lr_decay_style"] = "lr_decay_style"
    if state["lr_warmup_steps"] > 0:
        keys["init_lr"] = "lr_warmup_init"
    if state["lr_decay_style"] != "constant":
        keys |= {name: name for name in ("lr_decay_steps", "min_lr")}
    if state["lr_decay_style"] == "WSD":
        keys |= {"wsd_decay_steps": "lr_wsd_decay_steps", "lr_wsd_decay_style": "lr_wsd_decay_style"}
    if state["wd_incr_style"] != "constant":
        keys["wd_incr_style"] = "weight_decay_incr_style"
    return {key: state[name] for name, key in keys.items() if name in state}


def _not_finite(state: State, chunks: Sequence[str]) -> list[str]:
    """Return the first weight with a value that no weight may have."""
    weights = ((name, value) for chunk in chunks for name, value in state.get(chunk, {}).items())
    found = ((name, not_finite(value)) for name, value in weights if isinstance(value, Tensor))
    return [
        f"{name} holds {value}: training had diverged before this save; use an earlier checkpoint"
        for name, value in found
        if value
    ][:1]


def _as_chained(state: dict[Any, Any], optimizer: "MegatronOptimizer") -> dict[Any, Any]:
    """Return a loaded state in the form that this optimizer reads.

    Sharded experts have a separate optimizer in the chain, which a layout without expert sharding does not have. The
    tensors are already cut for this layout; only the parameter groups have to move to another place in the state.
    """
    own = optimizer.chained_optimizers
    places = [state] if len(own) == 1 else [state.get(at, {}) for at in range(len(own))]
    if all("optimizer" in place for place in places) and (len(own) == 1 or "optimizer" not in state):
        return state
    parts = [state, *(state[key] for key in sorted(k for k in state if isinstance(k, int)))]
    saved = [part for part in parts if "optimizer" in part]
    if not saved:  # the plain fp32 optimizer, whose state is torch's
        return state
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    groups = {tuple(each[n] for n in names): each for part in saved for each in part["optimizer"]["param_groups"]}
    general = {key: value for key, value in saved[0].items() if not isinstance(key, int) and key != "param_state"}
    chained = []
    for place, each in zip(places, own, strict=True):
        ours = [
            groups[tuple(group[n] for n in names)] | {"is_expert_parallel": group["is_expert_parallel"]}
            for group in each.optimizer.param_groups
        ]
        chained.append(general | {"optimizer": {"param_groups": ours}, "param_state": place["param_state"]})
    return chained[0] if len(own) == 1 else dict(enumerate(chained))


def _write_json(folder: Path, name: str, content: State) -> files.FileRecord:
    return files.write_text(folder, name, json.dumps(content, indent=4, sort_keys=True, default=str))
