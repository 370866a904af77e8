"""Standalone servers: how buckets of weights reach them, their classes, and what follows their death."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf

from tests.workers.rollout import tiny
from tests.workers.rollout.subjects import NEVER_S
from verl.errors import MissingName, ServerError, WrongInput
from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.workers.config import AgentLoopConfig, CustomAsyncServerConfig, ServerConfig
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.standalone import StandaloneServers, replica_class_of
from verl.workers.rollout.weight_channel import SharedMemory, WeightGroup, layout_of, open_store, read_shared

CPU = torch.device("cpu")


def bucket() -> list[tuple[str, torch.Tensor]]:
    """Return tensors of several dtypes, one of them strided, one without elements and one without axes."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(5, 7, generator=generator)
    tensors = {"a": matrix, "b": matrix.bfloat16().t(), "c": torch.tensor(3.0), "d": torch.empty(0, 4)}
    return list(tensors.items())


def same(found: list[tuple[str, torch.Tensor]], sent: list[tuple[str, torch.Tensor]]) -> bool:
    pairs = zip(found, sent, strict=True)
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_bucket_in_shared_memory() -> None:
    """The memory grows and is used again; it is gone once it is closed."""
    memory, sent = SharedMemory(), bucket()
    for part in (sent[2:], sent, sent[:1]):
        memory.fill(part)
        assert same(read_shared(memory.path, layout_of(part), CPU), part)
    path = memory.path
    memory.close()
    assert not os.path.exists(path)


def test_a_bucket_in_a_group() -> None:
    sent = bucket()
    store, meeting = open_store("127.0.0.1", 3, "gloo", timeout_s=600)
    found: dict[int, Any] = {}

    def receive(rank: int) -> None:
        group = WeightGroup(meeting, rank, CPU)
        found[rank] = [group.receive(layout_of(sent)), group.receive(layout_of(sent[:1]))]

    receivers = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in receivers:
        thread.start()
    group = WeightGroup(meeting, 0, CPU, store)
    group.send(sent)
    group.send(sent[:1])
    for thread in receivers:
        thread.join()
    for first, second in found.values():
        assert same(first, sent) and same(second, sent[:1])


SERVERS = """
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica, vLLMServer

class Server(vLLMServer):
    pass

class Replica(vLLMReplica):
    pass

class Other:
    pass
"""


def test_classes_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "servers.py"
    path.write_text(SERVERS)

    def chosen(name: str | None, hybrid: bool = False) -> Any:
        custom = CustomAsyncServerConfig(path=str(path) if name else None, name=name)
        return replica_class_of(tiny.rollout_config("vllm", agent=AgentLoopConfig(custom_async_server=custom)), hybrid)

    usual = chosen(None)
    assert usual.__name__ == "vLLMReplica" and usual.server_class.__name__ == "vLLMServer"
    assert chosen("Replica").__name__ == "Replica"
    with_server = chosen("Server")
    assert issubclass(with_server, usual) and with_server.server_class.__name__ == "Server"
    pickled = ray.cloudpickle.dumps(with_server.server_class)
    del sys.modules[with_server.server_class.__module__]  # as in the process of the server
    assert ray.cloudpickle.loads(pickled).__name__ == "Server"
    with pytest.raises(WrongInput, match="name=Other: is neither a RolloutReplica nor a server"):
        chosen("Other")
    assert chosen("Replica", hybrid=True) is chosen("Replica")
    with pytest.raises(WrongInput, match="name=Server: is a standalone server, and .*hybrid_engine=true starts none"):
        chosen("Server", hybrid=True)


def test_placements_that_are_refused() -> None:
    replica = replica_class_of(tiny.rollout_config("vllm"))(
        0, tiny.rollout_config("vllm", tensor_model_parallel_size=2), None, gpus_per_node=1
    )
    with pytest.raises(WrongInput, match="of 2 devices .* does not fit a node of 1"):
        replica.init_standalone()
    with pytest.raises(NotImplementedError, match="call init_hybrid .* or init_standalone") as refused:
        replica.init_colocated(None)  # type: ignore[arg-type]
    assert isinstance(refused.value, WrongInput)
    assert not hasattr(replica, "server_address")
    with pytest.raises(MissingName, match="main_generation_server"):
        _ = replica.server_address
    with pytest.raises(RuntimeError, match="does not serve yet"):
        _ = replica.server_handle


class Unable:
    """A server whose engine does not start."""

    def __init__(self) -> None:
        try:
            raise KeyError("the engine")
        except KeyError as error:
            raise RuntimeError("no memory; the end of its log:\nTraceback\n  File\nValueError: too little") from error

    def ready(self) -> None:
        """Never reached."""


def test_why_a_server_has_not_started(ray_cluster: None) -> None:
    import ray

    from verl.workers.rollout.server_replica import cause_of_death

    actor = ray.remote(Unable).options(num_cpus=0).remote()
    with pytest.raises(ray.exceptions.RayActorError) as failed:
        ray.get(actor.ready.remote())
    told = "RuntimeError: no memory; the end of its log:\nTraceback\n  File\nValueError: too little"
    assert cause_of_death(failed.value) == told


class Mortal:
    """A server without an engine, which can lose it."""

    def __init__(self, *args: Any) -> None:
        self.is_dead = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def ready(self) -> dict[str, int]:
        if self.is_dead:
            raise ServerError("the engine has died")
        return {"pid": os.getpid()}

    async def lose_engine(self) -> None:
        self.is_dead = True

    async def version(self) -> int:
        await self.ready()
        return 0

    async def health(self, timeout_s: float) -> dict[str, int]:
        await self.goes_on.wait()
        return {"version": await self.version()}

    async def hang(self) -> None:
        self.goes_on.clear()

    async def go_on(self) -> None:
        self.goes_on.set()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_a_server_that_hangs_does_not_delay_the_replacement_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of its silence nothing would be done."""
    config = tiny.rollout_config("vllm", nnodes=1, n_gpus_per_node=2, server=ServerConfig(heartbeat_timeout=NEVER_S))
    replica_class = replica_class_of(config)
    monkeypatch.setattr(replica_class, "server_class", Mortal)
    servers = StandaloneServers(replica_class, config, None, "cpu")
    servers.sync(lambda handles: {})
    hangs, dies = servers.replicas
    pid = dies.wait_until_ready()["pid"]
    ray.get(hangs.server_handle.hang.remote())
    with servers.watched(lambda handles: {}):
        ray.get(dies.server_handle.lose_engine.remote())
        found = pid
        while found == pid:
            time.sleep(0.1)
            with contextlib.suppress(ServerError, ray.exceptions.RayActorError):  # it is about to end, or starts
                found = ray.get(dies.server_handle.ready.remote())["pid"]
        ray.get(hangs.server_handle.go_on.remote())
    assert servers.replaced == [dies.server_name]
    for replica in servers.replicas:
        replica.shutdown()


class Once(Mortal):
    """A server that starts once; its file is the name of its model."""

    def __init__(self, name: str, rank: int, config: Any, mark: Path, waits_for_weights: bool) -> None:
        super().__init__()
        if mark.exists():
            raise RuntimeError("no memory")
        mark.touch()

    async def generate(self, **request: Any) -> None:
        await self.goes_on.wait()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_a_server_that_cannot_start_again_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for a server, too; the limit of the start is never reached."""
    server = ServerConfig(max_start_wait_time=NEVER_S)
    config = tiny.rollout_config("vllm", nnodes=1, n_gpus_per_node=1, server=server)
    replica_class = replica_class_of(config)
    monkeypatch.setattr(replica_class, "server_class", Once)
    mark: Any = tmp_path / "started"
    servers = StandaloneServers(replica_class, config, mark, "cpu", waits_for_weights=False)
    ended = threading.Event()
    monkeypatch.setattr(servers, "shutdown", lambda: (StandaloneServers.shutdown(servers), ended.set()))
    (handle,) = servers.handles.values()
    pid = ray.get(handle.ready.remote())["pid"]
    node = {"hybrid_engine": False, "rollout": {"server": {"max_start_wait_time": NEVER_S}}}
    manager = AsyncLLMServerManager(OmegaConf.create({"actor_rollout_ref": node}), [handle])
    told = "cannot start again: .*no memory"
    with pytest.raises(ServerError, match=told), servers.watched(None):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=told):
            asyncio.run(manager.generate("1", prompt_ids=[1], sampling_params={}))
        assert ended.wait(NEVER_S)
        ray.get(handle.version.remote())  # fails; what ended the watch explains it


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_a_restart_is_not_over_before_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends it in the background; until then it answers."""
    config = tiny.rollout_config("vllm")
    replica = replica_class_of(config)(0, config, None, gpus_per_node=1)
    replica.server_class = Mortal
    replica.init_standalone()
    kill = ray.kill

    def kill_later(handle: Any, no_restart: bool) -> None:
        threading.Timer(1.0, kill, (handle,), {"no_restart": no_restart}).start()

    monkeypatch.setattr(ray, "kill", kill_later)
    pid = replica.wait_until_ready()["pid"]
    ray.get(replica.server_handle.lose_engine.remote())
    with pytest.raises(ServerError, match="the engine has died"):
        replica.wait_until_ready()
    replica.restart()
    assert replica.wait_until_ready()["pid"] != pid
    monkeypatch.undo()
    replica.shutdown()


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_servers_that_die_are_replaced(tmp_path: Path) -> None:
    """One loses its engine and one its process; afterwards both have the current weights, which come in groups.

    A request whose engine dies moves to the other server, and gets the same tokens and log-probabilities.
    """
    import ray

    from verl.workers.config import HFModelConfig
    from verl.workers.sharding_manager import ServerSync

    model = tiny.build_model()
    model.save_pretrained(tmp_path)
    server = ServerConfig(heartbeat_timeout=NEVER_S)  # a death that is known ends every wait
    config = tiny.rollout_config("vllm", mode="async", max_model_len=64, nnodes=1, n_gpus_per_node=2, server=server)
    model_config = HFModelConfig(path=str(tmp_path), load_tokenizer=False)
    servers = StandaloneServers(replica_class_of(config), config, model_config, "cpu")
    trainer: Any = tiny.TrainerStandIn(model)
    sync = ServerSync(trainer, bucket_bytes=1 << 18, timeout_s=NEVER_S, by_memory=False)
    prompts = tiny.prompts_batch(2)
    ids, seed = prompts.non_tensor_batch["raw_prompt_ids"][0], int(prompts.batch["sampling_seed"][0])
    params = {"temperature": tiny.TEMPERATURE, "seed": seed, "max_tokens": 10, "logprobs": True}

    def send(handles: dict[str, Any]) -> dict[str, str]:
        return sync.run(handles, None)

    stopped = servers.replicas[0].wait_until_ready()["engine_pids"][-1]
    os.kill(stopped, signal.SIGSTOP)  # it dies while the trainer waits for it
    threading.Timer(1.0, os.kill, (stopped, signal.SIGKILL)).start()
    assert list(send({servers.replicas[0].server_name: servers.replicas[0].server_handle})) == ["vllm_server_0_0"]

    def plain(output: Any) -> Any:
        return replace(output, num_cached_tokens=0)

    def answers() -> list[Any]:
        outputs = ray.get([handle.generate.remote(ids, params, "1") for handle in servers.handles.values()])
        return [plain(output) for output in outputs]

    servers.sync(send)
    assert sync.last_sync["servers"] == 2 and sync.last_sync["buckets"] > 1
    first, second = answers()
    assert first == second and first.versions == [(0, len(first.token_ids))]

    tiny.disturb(model, 0.3, seed=9)
    trainer.weights_version = 1
    places = [replica.wait_until_ready() for replica in servers.replicas]

    async def moved() -> tuple[int, Any]:
        """Kill the engine that has a request; return the number of its server, and the response of the other one."""
        attempt = Attempt("1", "prompt", 0, "loop")
        manager = AsyncLLMServerManager(OmegaConf.create({}), list(servers.handles.values())).of(attempt)
        ask = partial(manager.generate, "conversation", prompt_ids=ids, sampling_params=params)
        assert plain(await ask()) == first
        home = next(number for number in (0, 1) if f"server {number} of" in attempt.servers[0])
        os.kill(places[home]["engine_pids"][-1], signal.SIGSTOP)
        response = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        assert not response.done()
        os.kill(places[home]["engine_pids"][-1], signal.SIGKILL)
        output = await response
        assert len(set(attempt.servers)) == 2 and attempt.servers[0] == attempt.servers[1]
        return home, plain(output)

    home, output = asyncio.run(moved())
    assert output == first
    os.kill(places[1 - home]["pid"], signal.SIGKILL)
    servers.sync(send)
    first, second = answers()
    assert first == second and first.versions == [(1, len(first.token_ids))]
    again = [replica.wait_until_ready() for replica in servers.replicas]
    assert not {place["pid"] for place in places} & {place["pid"] for place in again}
    assert not any(os.path.exists(f"/proc/{pid}") for place in places for pid in place["engine_pids"])

    with servers.watched(send):  # while nothing else happens
        os.kill(again[0]["engine_pids"][-1], signal.SIGSTOP)
        ray.get(servers.replicas[0].server_handle.shutdown.remote())  # as the heartbeat does after its deadline
        while ray.get(servers.replicas[1].server_handle.version.remote()) != 1 or len(servers.replaced) < 3:
            asyncio.run(asyncio.sleep(0.1))
    servers.sync(send)
    assert answers() == [first, first]

    trainer.weights_version = 2  # the trainer goes on, and a batch is under way with the weights of before
    with servers.watched(send, keeps_weights=True):
        ray.get(servers.replicas[0].server_handle.shutdown.remote())
        while len(servers.replaced) < 4:
            asyncio.run(asyncio.sleep(0.1))
    servers.replicas[0].wait_until_ready()
    versions = [ray.get(replica.server_handle.version.remote()) for replica in servers.replicas]
    assert versions == [NO_WEIGHTS, 1]  # nobody gets others while one has them
    with servers.watched(send, keeps_weights=True):
        ray.get(servers.replicas[1].server_handle.shutdown.remote())
        while versions != [2, 2]:  # when the last one is gone, all get the newest
            with contextlib.suppress(ServerError, ray.exceptions.RayActorError):
                versions = [ray.get(replica.server_handle.version.remote()) for replica in servers.replicas]
            asyncio.run(asyncio.sleep(0.1))
    for replica in servers.replicas:
        replica.shutdown()
    assert all(replica.resource_pool.pgs is None for replica in servers.replicas)  # their devices are free
