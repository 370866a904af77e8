"""Code that runs in the processes of SGLang's engine: our patches, and the receiver of weights.

SGLang's engine starts its processes with these functions, which multiprocessing imports by name.
"""

import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl.utils.import_utils import hidden
from verl.workers.rollout.sglang_rollout import patch
from verl.workers.rollout.sglang_rollout.weights import EngineWeights, UnknownTensorError, deserialized
from verl.workers.rollout.weight_channel import (
    Bucket,
    Layout,
    Meeting,
    Received,
    Rendezvous,
    WeightGroup,
    common_dtypes,
    read_shared,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput, EndWeightUpdateReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

# Both packages warn at import of what a CPU lacks. The warnings would fill the log, whose end explains a death.
warnings.filterwarnings("ignore", category=UserWarning, module=r"(sglang|megatron)\.")


def run_scheduler(log: str, batch_invariant: bool, *args: Any, **kwargs: Any) -> None:
    """Run a scheduler, which holds a part of the model.

    Args:
        log: the path of the pipe that takes its log.
        batch_invariant: whether no log-probability may depend on the other requests of a step.
    """
    _log_to(log)
    _lock_without_name()
    # SGLang imports wandb through Megatron-Core; the folders of wandb stay if the process is killed.
    with hidden(["wandb"]):
        from sglang.srt.managers.scheduler import run_scheduler_process

        patch.apply(batch_invariant)
        patch.answer_calls(_serve, merged)
        run_scheduler_process(*args, **kwargs)
    _end()


def run_detokenizer(log: str, *args: Any, **kwargs: Any) -> None:
    """Run the detokenizer, through which the tokens of all requests go."""
    _log_to(log)
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
    _end()


def _log_to(path: str) -> None:
    """Send standard error to a pipe of the engine's owner, with what C++ writes there when a process crashes."""
    pipe = os.open(path, os.O_WRONLY)
    os.dup2(pipe, 2)
    os.close(pipe)


def _lock_without_name() -> None:
    """Make tqdm use a thread lock.

    Its default lock includes a named semaphore, which a killed engine would leave behind in the system.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _end() -> None:
    """End this process after an error that SGLang has logged, since its threads would keep it alive."""
    sys.stderr.flush()
    os._exit(1)


class WeightReceiver:
    """Loads the weights of the trainer into the model of a scheduler, whole or not at all.

    After the load it reads the parameters back, and compares them with the tensors that arrived.
    """

    def __init__(self, manager: "SchedulerWeightUpdaterManager") -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        runner = manager.tp_worker.model_runner
        self._manager = manager
        self._device = torch.device(runner.device, runner.gpu_id) if runner.device != "cpu" else torch.device("cpu")
        self._tp_rank: int = parallel.tp_rank
        replica = parallel.dp_rank if parallel.dp_size > 1 else 0  # without attention of data-parallel ranks
        self._rank: int = 1 + (replica or 0) * parallel.tp_size + parallel.tp_rank
        self._has_stages: bool = parallel.pp_size > 1
        is_unread = runner.server_args.load_format == "dummy"
        self._weights = EngineWeights(runner.model, self._has_stages or parallel.ep_size > 1, is_unread)
        self._group: WeightGroup | None = None

    def ping(self) -> None:
        """Answer."""

    def connect(self, meeting: Meeting) -> None:
        """Join the group of the trainer and this engine's schedulers."""
        self._group = None  # dropping the old group closes the connection to a sender that is gone
        self._group = WeightGroup(Rendezvous(**meeting), self._rank, self._device)

    def begin(self) -> None:
        """Open the model for a weight update."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._manager._session is not None:
            self.abort()
        self._weights.begin()
        _check(self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))

    def load(self, layout: Layout, path: str | None) -> None:
        """Load the next bucket, from shared memory or from the group.

        Raises: RuntimeError naming a tensor that the model lacks.
        """
        if path is not None:
            self._load(read_shared(path, layout, self._device))
            return
        assert self._group is not None, "connect comes before the first bucket"
        self._load(self._group.receive(layout))

    def load_handles(self, payloads: list[str]) -> None:
        """Load the next bucket from the memory of this rank's GPU."""
        self._load(deserialized(payloads[self._tp_rank]))

    def _load(self, bucket: Bucket) -> None:
        if self._manager._session is None:
            raise RuntimeError("weight sync: no update has begun")
        self._weights.load(bucket)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the sender may reuse the memory

    def finish(self) -> Received:
        """Close the model, compare it with the tensors that arrived, and drop cached results of older weights.

        Returns the ``checksums`` of the tensors that arrived, the ``dtypes`` of the parameters that took them by plain
        copies, and how many of them are ``unverified``.
        Raises: RuntimeError naming tensors that are missing or differ.
        """
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._check_complete()
        _check(self._manager.end_weight_update(EndWeightUpdateReqInput()))
        unverified = self._weights.verify()
        if not self._manager.flush_cache(empty_cache=self._device.type != "cpu"):  # else it collects garbage
            raise RuntimeError("weight sync: requests run during an update, and hold keys and values of other weights")
        patch.forget_images()
        return {"checksums": self._weights.received, "unverified": unverified, "dtypes": self._weights.dtypes}

    def _check_complete(self) -> None:
        """Raise RuntimeError on all ranks if any rank lacks tensors, or if some tensor has a place on no rank.

        Ranks may hold different experts, so one rank cannot decide alone. All ranks must raise together, because
        SGLang's end of an update waits for all of them.
        """
        error = None
        try:
            self._weights.check_complete()
        except RuntimeError as missing:
            error = str(missing)
        group = self._manager.tp_cpu_group
        found: list[tuple[str | None, set[str]]] = [(None, set())] * torch.distributed.get_world_size(group=group)
        torch.distributed.all_gather_object(found, (error, self._weights.ignored), group=group)
        errors = dict.fromkeys(each for each, _ in found if each is not None)
        if errors:
            raise RuntimeError("; ".join(errors))
        nowhere = set.intersection(*(ignored for _, ignored in found))
        if nowhere and not self._has_stages:  # with pipeline stages, another stage may hold the layer of the tensor
            raise UnknownTensorError(min(nowhere))

    def abort(self) -> None:
        """Close the model without checking its weights."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._weights.begin()
        if self._manager._session is not None:
            _check(self._manager.end_weight_update(EndWeightUpdateReqInput()))


def merged(results: Sequence[Received | None]) -> Received | None:
    """Merge the results of several ranks into one.

    Checksums on which they do not agree are None, so that they equal no checksum of a trainer.
    """
    received = [each for each in results if each is not None]
    assert len(received) in (0, len(results)), "all ranks answer a verb, or none does"
    if not received:
        return None
    found = {
        name: value if all(each["checksums"].get(name) == value for each in received) else None
        for name, value in received[0]["checksums"].items()
    }
    dtypes = common_dtypes(each["dtypes"] for each in received)
    return {"checksums": found, "unverified": max(each["unverified"] for each in received), "dtypes": dtypes}


def _check(answer: "BeginWeightUpdateReqOutput | EndWeightUpdateReqOutput") -> None:
    if not answer.success:
        raise RuntimeError(f"weight sync: {answer.message}")


_receiver: WeightReceiver | None = None
_VERBS = {"ping", "connect", "begin", "load", "load_handles", "finish", "abort"}


def _serve(manager: "SchedulerWeightUpdaterManager", verb: str, arguments: dict[str, Any]) -> Any:
    """Answer a call of the engine's owner."""
    global _receiver
    assert verb in _VERBS, verb
    if _receiver is None:
        _receiver = WeightReceiver(manager)
    return getattr(_receiver, verb)(**arguments)
