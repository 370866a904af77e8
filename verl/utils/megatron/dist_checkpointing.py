"""Distributed checkpoints of Megatron-Core in its torch_dist format, which any layout reads."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from verl.utils.checkpoint.files import CheckpointError
from verl.utils.checkpoint.torch_dist import VOCABULARY
from verl.utils.megatron import cpu_support

cpu_support.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

FORMAT = ("torch_dist", 1)
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state as one tensor per parameter, so that it can be cut anew."""


class _Strategy(TorchDistSaveShardedStrategy):
    """Writes from this process: the writer of Megatron-Core starts others, which want a guarded entry module."""

    def __init__(self, copies: bool) -> None:
        super().__init__(*FORMAT)
        self.copies = copies

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Agree with all ranks on who writes what; ``copies`` keeps the values of now. Collective."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self.copies:
            for part in (each for parts in grouped.values() for each in parts if isinstance(each, ShardedTensor)):
                part.data = part.data.detach().to("cpu", copy=True)
        tensors = mcore_to_pyt_state_dict(grouped, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer, ranks = FileSystemWriter(checkpoint_dir), _DistWrapper(None, True, 0)
        metadata: Any = None

        def own_plan() -> Any:
            planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator)
            return writer.prepare_local_plan(planner.create_local_plan())

        def common_plan(plans: list[Any]) -> list[Any]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(ranks.reduce_scatter("plan", own_plan, common_plan))
        written: list[Any] = []

        def write() -> None:
            written.extend(writer.write_data(plan, planner).wait())

        def finish() -> None:
            results = ranks.gather_object(written)
            if ranks.is_coordinator:
                writer.finish(metadata, results)

        return AsyncRequest(write, (), [finish])


class PendingSave:
    """Files that a thread of every rank is writing. ``finish``, by all ranks, makes them a checkpoint."""

    def __init__(self, request: AsyncRequest, then: Callable[[], None]) -> None:
        self._request, self._then = request, then
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="save_checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._request.async_fn(*self._request.async_fn_args)
            self._then()
        except BaseException as error:  # raised on all ranks when they finish
            self._error = error

    @property
    def is_written(self) -> bool:
        """Whether the thread of this rank has ended."""
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the thread of this rank; returns what went wrong."""
        self._thread.join()
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def finish(self) -> None:
        """Write what names the files of all ranks; collective."""
        for step in self._request.finalize_fns:
            step()


def save_dist_checkpointing(
    sharded_state_dict: dict[str, Any],
    ckpt_path: str | Path,
    async_save: bool = False,
    then: Callable[[], None] = lambda: None,
) -> PendingSave:
    """Start to write a state into an empty folder, from threads; collective.

    With ``async_save`` the values of this moment are copied to the host first, and may change at once. The caller
    waits for all ranks and then lets them ``finish``; ``then`` runs on the thread behind the write.

    Raises: CheckpointError when the ranks do not hold each part once.
    """
    try:
        request = dist_checkpointing.save(
            sharded_state_dict, str(ckpt_path), _Strategy(copies=async_save), async_sharded_save=True
        )
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{ckpt_path} cannot be written: {error}") from error
    return PendingSave(request, then)


def load_dist_checkpointing(sharded_state_dict: dict[str, Any], ckpt_dir: str | Path) -> dict[str, Any]:
    """Return a state with the tensors of a folder, cut as ``sharded_state_dict`` says; collective.

    Raises: CheckpointError naming what is missing or of another shape.
    """
    try:
        state: dict[str, Any] = dist_checkpointing.load(sharded_state_dict, str(ckpt_dir))
    except CheckpointException as error:  # of torch, not an Exception: one for every rank
        reasons = {str(reason[0]) for reason in error.failures.values()}
        hint = "it belongs to another model: " if any("shape mismatch" in reason for reason in reasons) else ""
        raise CheckpointError(hint + "; ".join(sorted(reasons))) from error
    except (CheckpointingException, KeyError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    return state


def chunk_names(chunks: Sequence[Any]) -> list[str]:
    """Return the keys under which the chunks of a model stand in a state."""
    return ["model"] if len(chunks) == 1 else [f"model{at}" for at in range(len(chunks))]


def sharded_weights(chunks: Sequence[Any]) -> dict[str, Any]:
    """Describe the parameters of this rank as parts of global tensors, whose names hold for every layout.

    Tensors of the vocabulary may have another padding than in a checkpoint: it differs with the layout.
    """
    state = {}
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        own = chunk.sharded_state_dict(metadata=dict(METADATA))
        for value in own.values():
            if isinstance(value, ShardedTensor) and value.key in VOCABULARY and value.global_shape[0] > 1:
                value.allow_shape_mismatch = True
        state[name] = own
    return state


def tensor_names(sharded_state_dict: dict[str, Any]) -> set[str]:
    """Return the global names of the tensors that a state describes."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return {value.key for value in nested_values(sharded_state_dict) if isinstance(value, kinds)}


__all__ = [
    "METADATA",
    "PendingSave",
    "chunk_names",
    "load_dist_checkpointing",
    "save_dist_checkpointing",
    "sharded_weights",
    "tensor_names",
]
