"""Weights from the trainer to standalone rollout servers."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
from torch import Tensor

from verl.errors import ServerError, WeightSyncError
from verl.single_controller.base.actor import Actor
from verl.utils import envs
from verl.utils.device import current_device, get_device_name, get_torch_device
from verl.utils.faults import is_skipped
from verl.utils.net_utils import LOOPBACK
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.server import cause_of
from verl.workers.rollout.weight_channel import (
    SharedMemory,
    WeightGroup,
    are_all_there,
    common_dtypes,
    known_dtypes,
    layout_of,
    open_store,
)
from verl.workers.sharding_manager.weight_sync import WeightSync

if TYPE_CHECKING:
    from ray import ObjectRef

    from verl.workers.engine.base import BaseEngine

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, Tensor]]
T = TypeVar("T")


@dataclass
class Target:
    """A server that gets weights.

    Attributes:
        handle: its actor.
        pid: process of the actor, by which a server that has started again is known.
        workers: number of the workers of its engine.
        shares_memory: whether it can read the memory of this process.
        group: the group in which its weights come, if it does not share memory.
    """

    name: str
    handle: Actor
    pid: int
    workers: int
    shares_memory: bool
    group: WeightGroup | None = None


class ServerWeights:
    """The engines of several servers, as ``WeightSync`` sees the rollout of a process; only rank 0 sends.

    A server that is gone, or does not answer in time, drops out of the update and is listed in ``lost``; the update of
    the others goes on. Any other failure of one server ends the update of all.

    Args:
        sends: whether this process sends, as rank 0 of the trainer does.
        timeout_s: seconds that a server may take for one call.
        by_memory: whether servers of this node read shared memory; None: if they run on CPUs.
    """

    pending_bytes = 0

    def __init__(self, sends: bool, timeout_s: float, by_memory: bool | None = None) -> None:
        self._sends = sends
        self._timeout_s = timeout_s
        self._by_memory = get_device_name() == "cpu" if by_memory is None else by_memory
        self._known: dict[str, Target] = {}
        self._targets: dict[str, Target] = {}
        self._memory: SharedMemory | None = None
        self._received: list[dict[str, int]] = []
        self._step: int | None = None
        self.lost: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.unverified = 0

    def choose(self, handles: Mapping[str, Actor], version: int, step: int | None) -> list[str]:
        """Choose the servers that do not have a version of the weights, and return their names.

        Args: ``handles`` are the actors of all servers by name; ``step`` is that of the run, for messages.
        """
        self.lost = {}
        self._step = step
        self._targets = {}
        if not self._sends:
            return []
        places = self._call_all(handles, lambda name: handles[name].ready.remote())
        versions = self._call_all(places, lambda name: handles[name].version.remote())
        here = ray.get_runtime_context().get_node_id()
        for name, found in versions.items():
            place = places[name]
            if found == version:
                continue
            known = self._known.get(name)
            # A server that has started again is another process, and its workers are in no group.
            if known is None or known.pid != place["pid"]:
                shares = self._by_memory and place["node"] == here
                self._known[name] = Target(name, handles[name], place["pid"], place["engine_workers"], shares)
            self._targets[name] = self._known[name]
        return list(self._targets)

    # ---- what WeightSync calls

    def begin_update(self) -> None:
        """Pause the chosen servers, and open their models."""
        self._received = []
        for target in list(self._targets.values()):
            if not target.shares_memory and target.group is None:
                self._each({target.name: target}, self._connect)
        self._each(self._targets, lambda target: self._call(target.handle.begin_update.remote(self._step)))

    def load(self, bucket: Bucket) -> None:
        """Send a bucket to the chosen servers, and wait until they have loaded it."""
        if not self._targets:
            return
        path = None
        if any(target.shares_memory for target in self._targets.values()):
            self._memory = self._memory or SharedMemory()
            # Filled once for all servers of the node; they copy out of it before their call returns, so the next bucket
            # may replace it.
            self._memory.fill(bucket)
            path = self._memory.path
        layout = layout_of(bucket)

        def send(target: Target) -> None:
            loaded = target.handle.load.remote(layout, path if target.shares_memory else None, self._timeout_s)
            if target.group is not None:
                try:
                    target.group.send(bucket)
                # The answer of the call tells more than the broken connection, so its error goes first.
                except RuntimeError as error:  # torch.distributed raises it: the other side is gone, or has refused
                    self._call(loaded)
                    raise ServerError(f"the connection to rollout server {target.name} broke: {error}") from error
            self._call(loaded)

        self._each(self._targets, send)

    def finish_update(self, version: int) -> None:
        """Complete the update of the chosen servers; they stay paused until ``resume``."""
        found = self._each(
            self._targets, lambda target: self._call(target.handle.finish_update.remote(version, self._timeout_s))
        )
        self._received = [each["checksums"] for each in found]
        self.unverified = max((each["unverified"] for each in found), default=0)
        self.dtypes = known_dtypes(common_dtypes(each["dtypes"] for each in found))

    def abort_update(self) -> None:
        """Abort the update; a server that cannot even do that is lost."""
        self._each(self._targets, lambda target: self._call(target.handle.abort_update.remote()))

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return name and checksum of a tensor as it is sent; the engine compares it with its parts."""
        return (name, tensor_checksum(tensor)) if self._targets else None

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the servers held a tensor in the last update; see ``BaseRollout``."""
        return self.dtypes.get(name)

    def weights_checksum(self) -> dict[str, int]:
        """Return the checksums of the tensors that arrived, without those that the servers do not agree on."""
        if not self._received:
            return {}
        first, *others = self._received
        return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}

    @property
    def nobody_listens(self) -> bool:
        """Whether all chosen servers have been lost."""
        return not self._targets

    def resume(self, handles: Mapping[str, Actor]) -> None:
        """Let the servers answer requests, including servers that no update has paused."""
        for name in self._call_all(handles, lambda name: handles[name].resume.remote()):
            logger.debug("rollout server %s serves", name)

    def close(self) -> None:
        """Free the shared memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # ---- calls

    def _connect(self, target: Target) -> None:
        """Form a group with the workers of a server's engine."""
        is_alone = sum(node["Alive"] for node in ray.nodes()) == 1
        host = LOOPBACK if is_alone else ray.util.get_node_ip_address().strip("[]")
        backend = "nccl" if get_device_name() == "cuda" else "gloo"
        store, meeting = open_store(host, 1 + target.workers, backend, self._timeout_s)
        joined = target.handle.connect.remote(asdict(meeting))
        # Forming the group blocks without a way out. So this waits until the members have come, or the call that brings
        # them has failed.
        while not are_all_there(store, meeting.size):
            if ray.wait([joined], timeout=_POLL_S)[0]:
                self._call(joined)
        device = torch.device("cpu") if backend == "gloo" else current_device()
        try:
            target.group = WeightGroup(meeting, 0, device, store)
        except RuntimeError as error:
            raise ServerError(f"rollout server {target.name} has not joined the group of weights: {error}") from error
        self._call(joined)

    def _call(self, ref: "ObjectRef[T]") -> T:
        """Wait for a call of a server.

        Raises: ServerError if the server is gone or does not answer; the error of the call.
        """
        limit_s = self._timeout_s + _GRACE_S
        try:
            return ray.get(ref, timeout=limit_s)
        except ray.exceptions.RayActorError as error:
            raise ServerError(f"its process has died: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise ServerError(f"it has not answered for {limit_s:g} s") from error

    def _call_all(self, names: Iterable[str], call: "Callable[[str], ObjectRef[T]]") -> dict[str, T]:
        """Call several servers at the same time; return the results of the live ones."""
        found = self._in_threads({name: partial(lambda name: self._call(call(name)), name) for name in names})
        return dict(found)

    def _each(self, targets: Mapping[str, Target], work: Callable[[Target], T]) -> list[T]:
        """Work on all targets at the same time; return the results of the live ones."""
        return [value for _, value in self._in_threads({name: partial(work, each) for name, each in targets.items()})]

    def _in_threads(self, work: Mapping[str, Callable[[], T]]) -> list[tuple[str, T]]:
        """Call all functions at the same time; the worker's own thread may have an event loop, which Ray would block.

        Returns: name and result of those whose server is not lost.
        Raises: the first other error, after all have ended.
        """
        if not work:
            return []
        found: list[tuple[str, T]] = []
        failure: BaseException | None = None
        device = get_torch_device()
        with ThreadPoolExecutor(len(work), initializer=device.set_device, initargs=(device.current_device(),)) as pool:
            results = {name: pool.submit(call) for name, call in work.items()}
        for name, result in results.items():
            error = result.exception()
            if isinstance(error, ServerError):
                self._lose(name, error)
            elif error is not None:
                failure = failure or error
            else:
                found.append((name, result.result()))
        if failure is not None:
            raise failure
        return found

    def _lose(self, name: str, error: Exception) -> None:
        self.lost[name] = str(cause_of(error))
        logger.warning("rollout server %s is lost: %s", name, self.lost[name].partition("\n")[0])
        self._targets.pop(name, None)
        self._known.pop(name, None)


_GRACE_S = 10.0
_POLL_S = 0.05


class ServerSync:
    """Brings standalone servers to the weights of a training engine; collective over the ranks of the trainer."""

    def __init__(
        self, engine: "BaseEngine", bucket_bytes: int, timeout_s: float, by_memory: bool | None = None
    ) -> None:
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._weights = ServerWeights(envs.integer("RANK", 0) == 0, timeout_s, by_memory)
        self.last_sync: dict[str, float] = {}

    def run(self, handles: Mapping[str, Actor], step: int | None) -> dict[str, str]:
        """Send the weights to the servers that do not have them, and let all servers answer requests.

        Returns: why servers were lost, by name; on rank 0 only.
        Raises: WeightSyncError on all ranks when an update failed for another reason.
        """
        weights = self._weights
        behind = self._of_rank_0(list(weights.choose(handles, self._engine.weights_version, step)))
        if behind and not is_skipped("weight_sync", rank=envs.integer("RANK", 0), step=step):
            rollout: Any = weights
            weights.dtypes = self._of_rank_0(weights.dtypes)
            try:
                figures = WeightSync(self._engine, rollout, self._bucket_bytes, step).run()
                figures["unverified_tensors"] = float(weights.unverified)
                self.last_sync = figures | {"servers": float(len(behind) - len(weights.lost))}
            except WeightSyncError:
                if not self._of_rank_0(list(weights.lost) if weights.nobody_listens else []):
                    raise
            finally:
                weights.close()
        lost = dict(weights.lost)
        if envs.integer("RANK", 0) == 0:
            weights.resume({name: handle for name, handle in handles.items() if name not in lost})
            lost |= weights.lost
        return lost

    @staticmethod
    def _of_rank_0(choice: T) -> T:
        """Return the choice of rank 0, since a stream of weights is collective."""
        box = [choice]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]
