"""The standalone servers of a run: start, death, replacement, and current weights."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from verl.errors import ServerError, WrongInput
from verl.single_controller.base.actor import Actor
from verl.utils.import_utils import load_extern_type
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.registry import get_rollout_replica_class
from verl.workers.rollout.server import cause_of
from verl.workers.rollout.server_replica import RolloutReplica, cause_of_death

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Actor]], dict[str, str]]
"""Sends the trainer's weights to the servers of these names that do not have them; returns why servers were lost."""

_ATTEMPTS = 3
_POLL_S = 2.0


def replica_class_of(config: "RolloutConfig", hybrid: bool = False) -> type[RolloutReplica]:
    """Return the class of replicas: that of the engine, or the one of ``agent.custom_async_server``.

    The user's class is a replica, or a server that standalone replicas of the engine start.

    Raises: WrongInput for a class that is neither, and for a server in a ``hybrid`` run, which starts none.
    """
    found = get_rollout_replica_class(config.name)
    custom = config.agent.custom_async_server
    if custom.path is None:
        return found
    chosen = load_extern_type(custom.path, custom.name)
    module = sys.modules.get(getattr(chosen, "__module__", ""))
    if module is not None and not custom.path.startswith("pkg://"):  # Ray's processes cannot import a file by its name
        ray.cloudpickle.register_pickle_by_value(module)
    if isinstance(chosen, type) and issubclass(chosen, RolloutReplica):
        return chosen
    if not all(callable(getattr(chosen, verb, None)) for verb in ("generate", "abort", "health", "ready")):
        raise WrongInput(
            f"actor_rollout_ref.rollout.agent.custom_async_server.name={custom.name}: is neither a RolloutReplica nor "
            "a server with generate, abort, health and ready: derive it from vLLMReplica or vLLMServer"
        )
    if hybrid:
        raise WrongInput(
            f"actor_rollout_ref.rollout.agent.custom_async_server.name={custom.name}: is a standalone server, and "
            "actor_rollout_ref.hybrid_engine=true starts none: write false, or derive the class from vLLMReplica"
        )
    return type(f"{found.__name__}Of{custom.name}", (found,), {"server_class": chosen})


class StandaloneServers:
    """All standalone servers of a run; they start in the background.

    A server that has died, or whose engine has, is started again and gets the current weights, before a generation
    (``sync``) and during one (``watched``). Its handle stays the same.

    Args: ``device_name`` is the kind of their devices. Without ``waits_for_weights`` the servers read those of the
        model's files, and serve at once.
    Attributes: ``replaced`` names the servers that were started again, in order.
    """

    def __init__(
        self,
        replica_class: type[RolloutReplica],
        config: "RolloutConfig",
        model_config: "HFModelConfig | Any",
        device_name: str,
        waits_for_weights: bool = True,
    ) -> None:
        per_node = config.n_gpus_per_node
        count = config.nnodes * per_node // config.workers_per_engine
        self.replicas = [replica_class(rank, config, model_config, per_node) for rank in range(count)]
        self.replaced: list[str] = []
        self._pids: dict[str, int] = {}
        self._deadline_s = config.server.heartbeat_timeout
        self._lock = threading.Lock()
        for replica in self.replicas:
            replica.device_name = device_name
            replica.init_standalone(waits_for_weights)

    @property
    def handles(self) -> dict[str, Actor]:
        """The actors by name."""
        return {replica.server_name: replica.server_handle for replica in self.replicas}

    def sync(self, send: Send) -> None:
        """Replace the servers that are dead, and give all of them the current weights.

        Raises: ServerError if servers are lost again and again.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                self._of_each(self._make_ready)
                lost = send(self.handles)
                if not lost:
                    return
                for replica in self.replicas:
                    if replica.server_name in lost:
                        self._replace(replica, lost[replica.server_name])
            raise ServerError(f"rollout servers were lost in {_ATTEMPTS} updates of their weights, at last: {lost}")

    @contextmanager
    def watched(self, send: Send | None, keeps_weights: bool = False) -> Iterator[None]:
        """Replace servers that die inside the context, and ``send`` them the current weights if there is a trainer.

        With ``keeps_weights`` a batch goes on with the servers' older weights: no server gets other weights while a
        server with the older ones lives.

        Raises: the error that made this impossible; all servers are ended then, so that nobody waits for one.
        """
        watch = ServerWatch(self, send, keeps_weights)
        try:
            yield
        except Exception as error:  # the failure of a server explains whatever followed it
            if watch.failures:
                raise watch.failures[0] from error
            raise
        finally:
            watch.stop()

    def shutdown(self) -> None:
        """End all servers, and give their devices back."""
        for replica in self.replicas:
            replica.shutdown()

    def look_after(self, send: Send | None, keeps_weights: bool, stop: threading.Event) -> None:
        """Look for dead servers once, and replace them unless they are no longer needed.

        Args: ``send`` and ``keeps_weights`` as in ``watched``. Without ``send`` servers start again without weights.
        """

        def look_at(replica: RolloutReplica) -> bool:
            is_well = self._is_well(replica)
            if not is_well and not stop.is_set():
                self._restart_if_dead(replica)
            return is_well

        are_well = self._of_each(look_at)
        if all(are_well) or stop.is_set():
            return
        if send is not None and not (keeps_weights and any(are_well)):
            self.sync(send)

    def _of_each(self, look: Callable[[RolloutReplica], T]) -> list[T]:
        """Call a function for each server concurrently, and return the results; a hanging server delays no other."""
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            return list(pool.map(look, self.replicas))

    def _is_well(self, replica: RolloutReplica) -> bool:
        """Whether a server lives and has its weights; one that Ray has restarted waits for them until the next sync."""
        try:
            health = ray.get(replica.server_handle.health.remote(self._deadline_s), timeout=2 * self._deadline_s)
        except Exception:  # servers of users may raise anything; one that cannot tell its health is not used
            return False
        return not replica.waits_for_weights or bool(health["version"] != NO_WEIGHTS)

    def _restart_if_dead(self, replica: RolloutReplica) -> None:
        """Start a server again whose engine has ended, without waiting for it; Ray starts one whose process has.

        Raises: ServerError for one that Ray has started again in vain: it will not come back.
        """
        try:
            ray.get(replica.server_handle.version.remote(), timeout=_POLL_S)
        except ServerError as error:
            self._replace(replica, str(cause_of(error)))
        except ray.exceptions.RayActorError as error:
            if error.actor_init_failed:
                why = cause_of_death(error)
                raise ServerError(f"rollout server {replica.server_name} cannot start again: {why}") from error
        except Exception as error:  # the server is starting, or a user's server raises anything
            logger.debug("rollout server %s has no version: %r", replica.server_name, error)

    def _make_ready(self, replica: RolloutReplica) -> None:
        """Wait until a server has started; start it again if its engine has ended."""
        name = replica.server_name
        try:
            place = replica.wait_until_ready()
        except ServerError as error:
            self._replace(replica, str(cause_of(error)))
            place = replica.wait_until_ready()
        if self._pids.get(name, place["pid"]) != place["pid"]:  # Ray has restarted the process by itself
            logger.warning("rollout server %s has started again: its process has died", name)
        self._pids[name] = place["pid"]

    def _replace(self, replica: RolloutReplica, why: str) -> None:
        logger.warning("rollout server %s starts again: %s", replica.server_name, why.partition("\n")[0])
        self.replaced.append(replica.server_name)
        self._pids.pop(replica.server_name, None)
        replica.restart()


class ServerWatch:
    """A thread that looks after the servers of a run; see ``StandaloneServers.watched``.

    Attributes: ``failures`` holds the error that ended it; all servers are ended then.
    """

    def __init__(self, servers: StandaloneServers, send: Send | None, keeps_weights: bool = False) -> None:
        self.failures: list[Exception] = []
        self._servers = servers
        self._send = send
        self._keeps_weights = keeps_weights
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                self._servers.look_after(self._send, self._keeps_weights, self._stop)
        except Exception as error:  # the other thread raises it
            self.failures.append(error)
            self._servers.shutdown()

    def stop(self) -> None:
        """End the watch, and wait until it has ended."""
        self._stop.set()
        self._thread.join()
