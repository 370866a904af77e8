"""Checkpoints of Megatron-Core engines: tensors under names that hold for every layout, in its torch_dist format."""

import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from verl.base_config import as_yaml
from verl.utils import hdfs_io
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager, way_out
from verl.utils.checkpoint.files import (
    MEGATRON_LAYOUT_NAME,
    CheckpointError,
    FileRecord,
    Manifest,
    move_files,
    record_file,
    remove_checkpoint,
    remove_stale_files,
    temporary_folder,
    verify_checkpoint,
    write_file,
)
from verl.utils.checkpoint.hf_export import export_weights, save_config_and_tokenizer
from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER
from verl.utils.faults import fault_point
from verl.utils.fs import copy_to_local
from verl.workers.engine.megatron.layout import Layout

logger = logging.getLogger(__name__)

_HF_FOLDER = "huggingface"
_CONFIG_NAME = "transformer_config.json"
_OPTIMIZER_KEY = "use_distributed_optimizer"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state as one tensor per parameter, so that it can be cut anew."""


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes from this process: the writer of Megatron-Core starts others, which want a guarded entry module."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's parts; collective."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(grouped, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class MegatronCheckpointManager(BaseCheckpointManager):
    """Writes and reads the parts of this rank; every rank calls it, with the same arguments.

    ``model`` are the chunks of this rank. Any layout reads what another has written, random states excepted: they
    belong to ranks, and another layout keeps its own.
    """

    def __init__(self, model: list[Any], layout: Layout, hf_config: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.layout = layout
        self.hf_config = hf_config

    # ---- what is saved

    def _sharded(self, contents: list[str], is_loading: bool) -> dict[str, Any]:
        """Describe the tensors of this rank as parts of global ones."""
        state: dict[str, Any] = {}
        if "model" not in contents and "optimizer" not in contents:
            return state
        for at, chunk in enumerate(self.model):
            state[self._chunk_key(at)] = _any_padding(chunk.sharded_state_dict(metadata=dict(_METADATA)))
        if "optimizer" in contents:
            assert self.optimizer is not None
            state["optimizer"] = self.optimizer.sharded_state_dict(  # type: ignore[attr-defined]
                dict(state), is_loading=is_loading, metadata=dict(_METADATA)
            )
        if "model" not in contents:
            state = {"optimizer": state["optimizer"]}
        return state

    def _chunk_key(self, at: int) -> str:
        return "model" if len(self.model) == 1 else f"model{at}"

    def _place(self) -> dict[str, int]:
        layout = self.layout
        return {"world_size": layout.world_size, "tp": layout.tp_size, "pp": layout.pp_size, "cp": layout.cp_size}

    # ---- saving

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        named_weights: Iterator[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Write this rank's files, then its manifest; older checkpoints go when all ranks have done so.

        Raises: ValueError when ``save_contents`` names a part that this manager was not given.
        """
        folder = Path(local_path)
        self._need_parts("save_contents")
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_files(folder, self.world_size, self.rank)
        tensors = folder / TENSORS_FOLDER
        if self.rank == 0:
            shutil.rmtree(tensors, ignore_errors=True)
            tensors.mkdir()
        self.barrier()
        fault_point("save_checkpoint", rank=self.rank, step=global_step)
        state = self._sharded(self.save_contents, is_loading=False)
        if self.should_save_extra and self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        dist_checkpointing.save(state, str(tensors), _SaveInProcess("torch_dist", 1))
        records = self._tensor_files(folder)
        if self.should_save_extra:
            records.append(self._write_random_state(folder))
        records += self._write_shared_files(folder, named_weights)
        self.barrier()
        Manifest(self.world_size, self.rank, global_step, records).write(folder)
        self.barrier()
        self.keep_latest(local_path, max_ckpt_to_keep)
        if hdfs_path is not None and self.is_node_leader():
            hdfs_io.makedirs(os.path.dirname(hdfs_path.rstrip("/")), exist_ok=True)
            hdfs_io.copy(src=local_path, dst=hdfs_path)
        self.barrier()

    def _need_parts(self, key: str) -> None:
        parts: list[str] = getattr(self, key)
        if "optimizer" in parts and self.optimizer is None:
            raise ValueError(f"checkpoint.{key} names the optimizer, but this model has none: write [model]")

    def _tensor_files(self, folder: Path) -> list[FileRecord]:
        """Describe what this rank has written into the folder of tensors; rank 0 also what stands there once."""
        own = f"__{self.rank}_"
        names = [path.name for path in (folder / TENSORS_FOLDER).iterdir()]
        mine = [name for name in names if name.startswith(own) or (self.rank == 0 and not name.startswith("__"))]
        return [record_file(folder, f"{TENSORS_FOLDER}/{name}") for name in sorted(mine)]

    def _random_state_name(self) -> str:
        return f"rng_world_size_{self.world_size}_rank_{self.rank}.pt"

    def _write_random_state(self, folder: Path) -> FileRecord:
        state = {"layout": self._place(), "rng": self.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        return write_file(folder, self._random_state_name(), lambda file: torch.save(state, file))

    def _write_shared_files(self, folder: Path, named_weights: Iterator[tuple[str, Tensor]] | None) -> list[FileRecord]:
        """Write what the checkpoint holds once, on rank 0; the weights are gathered by all."""
        if self.rank != 0:
            if self.should_save_hf_model and named_weights is not None:
                export_weights(None, named_weights)
            return []
        layout = self._place() | self.layout_fields() | {_OPTIMIZER_KEY: self._is_sharded()}
        records = [_write_json(folder, MEGATRON_LAYOUT_NAME, layout)]
        if self.should_save_extra:
            fields = {key: value for key, value in vars(self.model[0].config).items() if _is_plain(value)}
            records.append(_write_json(folder, _CONFIG_NAME, fields))
        with temporary_folder(folder, _HF_FOLDER) as unfinished:
            save_config_and_tokenizer(unfinished, None, self.processing_class)
            self.hf_config.save_pretrained(unfinished)
            if self.should_save_hf_model and named_weights is not None:
                export_weights(unfinished, named_weights)
            records += move_files(unfinished, folder, _HF_FOLDER)
        return records

    # ---- loading

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore what ``load_contents`` names, whatever layout wrote it.

        Raises: CheckpointError, a ValueError, naming the file, what is wrong with it, and what to do.
        """
        self._need_parts("load_contents")
        path = self.checkpath(local_path, hdfs_path)
        folder = Path(copy_to_local(path) if hdfs_io.is_hdfs(path) else path)
        self._stop_on(local_path, self._problems(folder) if self.rank == 0 else [])
        wanted = self._sharded(self.load_contents, is_loading=True)
        try:
            state = dist_checkpointing.load(wanted, str(folder / TENSORS_FOLDER))
        except (CheckpointingException, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {local_path} cannot be loaded: {error}. Is it of the same model, with the parts that "
                f"checkpoint.load_contents names? {way_out(local_path)}"
            ) from error
        if self.should_load_model:
            for at, chunk in enumerate(self.model):
                chunk.load_state_dict(state[self._chunk_key(at)])
        if self.should_load_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[union-attr]
        elif self.optimizer is not None and self.should_load_model:
            self.optimizer.reload_model_params()  # type: ignore[attr-defined]
        if self.should_load_extra:
            self._load_extra(folder, state.get("lr_scheduler"))
        self.barrier()
        if del_local_after_load and self.is_node_leader():
            remove_checkpoint(folder)

    def _problems(self, folder: Path) -> list[str]:
        """Return what keeps this model from loading a checkpoint, whatever the rank."""
        if problems := verify_checkpoint(folder):
            return problems
        if not (folder / MEGATRON_LAYOUT_NAME).is_file():
            return [f"it has no {MEGATRON_LAYOUT_NAME}: another engine wrote it"]
        written = json.loads((folder / MEGATRON_LAYOUT_NAME).read_text())[_OPTIMIZER_KEY]
        if self.should_load_optimizer and written != self._is_sharded():
            return [f"it was written with megatron.{_OPTIMIZER_KEY}={as_yaml(written)}: write the same"]
        return []

    def _is_sharded(self) -> bool:
        return any(isinstance(each, DistributedOptimizer) for each in getattr(self.optimizer, "chained_optimizers", []))

    def _stop_on(self, path: str, problems: list[str]) -> None:
        found = self.agree(problems)
        if found:
            raise CheckpointError(f"checkpoint {path} cannot be loaded: {'; '.join(found[:4])}. {way_out(path)}")

    def _load_extra(self, folder: Path, schedule: dict[str, Any] | None) -> None:
        if self.lr_scheduler is not None and schedule is not None:
            self.lr_scheduler.num_steps = 0  # what is loaded is added
            self.lr_scheduler.load_state_dict(schedule)
        file = folder / self._random_state_name()
        try:
            state = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {"layout": None}
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error})") from error
        if state["layout"] != self._place():
            logger.warning("%s was written by another layout: this process keeps its random state", folder)
            return
        self.load_rng_state(state["rng"])
        get_cuda_rng_tracker().set_states(state["tracker"])


def _any_padding(state: dict[str, Any]) -> dict[str, Any]:
    """Let tensors of the vocabulary have another padding than in the checkpoint: it differs with the layout."""
    for key, value in state.items():
        if key.endswith(("word_embeddings.weight", "output_layer.weight")) and isinstance(value, ShardedTensor):
            value.allow_shape_mismatch = True
    return state


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | None)


def _write_json(folder: Path, name: str, content: dict[str, Any]) -> FileRecord:
    text = json.dumps(content, indent=4, sort_keys=True, default=str).encode()
    return write_file(folder, name, lambda file: file.write(text))
