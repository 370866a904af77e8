"""Distributed checkpoints in Megatron-Core's torch_dist format, which any parallel layout can read."""

import concurrent.futures
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    load_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from verl.errors import CheckpointError
from verl.utils.checkpoint.torch_dist import VOCABULARY, TorchDistReader
from verl.utils.failures import settle
from verl.utils.loading import load_tensors
from verl.utils.megatron import cpu_support

cpu_support.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state with one tensor per parameter, so that another layout can cut it differently."""

State = dict[str, Any]
"""A state dict: sharded tensors and plain values under names."""


class _Strategy(TorchDistSaveShardedStrategy):
    """Write from a thread of this process.

    Megatron-Core's writer starts processes, which fail in an entry module without ``if __name__ == "__main__"``.
    """

    def __init__(self, copies: bool) -> None:
        super().__init__("torch_dist", version=1)
        self.copies = copies

    def async_save(self, sharded_state_dict: State, checkpoint_dir: str | Path) -> AsyncRequest:
        """Plan with all ranks which rank writes which part; collective. ``copies`` snapshots the current values."""
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self.copies:
            for part in (each for parts in grouped.values() for each in parts if isinstance(each, ShardedTensor)):
                part.data = part.data.detach().to("cpu", copy=True)
        tensors = mcore_to_pyt_state_dict(grouped, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir)
        ranks = _DistWrapper(None, True, 0)
        metadata: Metadata | None = None

        def own_plan() -> SavePlan:
            planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator)
            return writer.prepare_local_plan(planner.create_local_plan())

        def common_plan(plans: list[SavePlan]) -> list[SavePlan]:
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
    """A save in progress: a thread on every rank writes files, and ``finish`` on all ranks completes them."""

    def __init__(self, request: AsyncRequest, then: Callable[[], None]) -> None:
        self._request = request
        self._then = then
        self._outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=settle, args=(self._outcome, self._write), name="save_checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self) -> None:
        self._request.async_fn(*self._request.async_fn_args)
        self._then()

    @property
    def is_written(self) -> bool:
        """Whether the thread of this rank has ended."""
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the thread of this rank, and return its error as text, or None."""
        self._thread.join()
        error = self._outcome.exception()
        return None if error is None else f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """Write the index of all ranks' files; collective."""
        for step in self._request.finalize_fns:
            step()


def save_dist_checkpointing(
    sharded_state_dict: State, ckpt_path: str | Path, async_save: bool = False, then: Callable[[], None] = lambda: None
) -> PendingSave:
    """Start to write a state into an empty folder from a thread on every rank; collective.

    With ``async_save`` the tensors are copied to the host first, so that training may change them at once. The caller
    waits for all ranks and then calls ``finish`` on each; ``then`` runs on the thread after the write.

    Raises: CheckpointError when the ranks together do not hold each part exactly once.
    """
    try:
        request = dist_checkpointing.save(
            sharded_state_dict, str(ckpt_path), _Strategy(copies=async_save), async_sharded_save=True
        )
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{ckpt_path} cannot be written: {error}") from error
    return PendingSave(request, then)


class _CheckedParts(FileSystemReader):
    """Parts that ``TorchDistReader`` has opened and checked; torch's own reader would unpickle the files."""

    def __init__(self, checked: TorchDistReader) -> None:
        super().__init__(checked.folder)
        self.checked = checked

    def read_metadata(self) -> Metadata:
        return self.checked.index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the items of a plan."""
        for item in plan.items:
            part = self.checked.load_part(item.storage_index)
            if item.type == LoadItemType.BYTE_IO:
                stored = io.BytesIO()  # the planner expects pickled bytes, and unpickles them
                torch.save(part, stored)
                stored.seek(0)
                planner.load_bytes(item, stored)
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _LoadParts(TorchDistLoadShardedStrategy):
    """Load the parts of a checked folder. Megatron-Core's own strategy opens the files by the reader of torch."""

    def __init__(self, checked: TorchDistReader) -> None:
        super().__init__()
        self.checked = checked

    def load(self, sharded_state_dict: State, checkpoint_dir: str | Path) -> State:
        """Return the state with its parts; collective."""
        tensors = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
        grouped, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(grouped, True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        load_state_dict(state, _CheckedParts(self.checked), planner=planner)
        plain = {name: _unwrap_pyt_sharded_tensor(part) for name, part in state.items()}
        loaded: State = _replace_sharded_keys_with_state_dict_keys(plain, flat, renamed)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _LoadCommon(TorchCommonLoadStrategy):
    """Load the state that all ranks share, as tensors and plain values."""

    def load_common(self, checkpoint_dir: str | Path) -> State:
        return load_tensors(Path(checkpoint_dir) / COMMON_STATE_FNAME)


def load_dist_checkpointing(sharded_state_dict: State, ckpt_dir: str | Path) -> State:
    """Read the parts that ``sharded_state_dict`` describes from a folder; collective.

    Raises: CheckpointError naming tensors that are missing or have another shape, and files that could run code.
    """
    strategies = _LoadParts(TorchDistReader(ckpt_dir)), _LoadCommon()
    try:
        state: State = dist_checkpointing.load(sharded_state_dict, str(ckpt_dir), *strategies)
    except CheckpointException as error:  # a BaseException of torch, with one failure per rank
        reasons = {str(reason[0]) for reason in error.failures.values()}
        hint = "it belongs to another model: " if any("shape mismatch" in reason for reason in reasons) else ""
        raise CheckpointError(hint + "; ".join(sorted(reasons))) from error
    except (CheckpointingException, KeyError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
    return state


def chunk_names(chunks: Sequence[nn.Module]) -> list[str]:
    """Return the keys of a model's chunks in a state."""
    return ["model"] if len(chunks) == 1 else [f"model{at}" for at in range(len(chunks))]


def sharded_weights(chunks: Sequence[nn.Module]) -> State:
    """Describe this rank's parameters as parts of global tensors with layout-independent names.

    The padding of vocabulary tensors depends on the layout, so their shapes may differ from those in a checkpoint.
    """
    state = {}
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        own = chunk.sharded_state_dict(metadata=dict(METADATA))
        for value in own.values():
            if isinstance(value, ShardedTensor) and value.key in VOCABULARY and value.global_shape[0] > 1:
                value.allow_shape_mismatch = True
        state[name] = own
    return state


def tensor_names(sharded_state_dict: State) -> set[str]:
    """Return the global names of the tensors that a state describes."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return {value.key for value in nested_values(sharded_state_dict) if isinstance(value, kinds)}
