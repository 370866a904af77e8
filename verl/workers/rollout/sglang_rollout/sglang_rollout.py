"""Generation by an SGLang engine on the devices of the trainer's workers, in an actor that they own."""

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from verl.errors import ServerError
from verl.protocol import DataProto, tensors_of
from verl.single_controller.base.actor import Actor
from verl.utils import envs
from verl.utils.device import get_device_name, get_torch_device, get_visible_devices_keyword
from verl.utils.failures import on_failure
from verl.utils.faults import fault_point
from verl.utils.vision.multi_modal import count_fetched
from verl.workers.config.engines import ENGINES
from verl.workers.config.rollout import start_limit_s
from verl.workers.rollout.base import (
    BaseRollout,
    Bucket,
    check_prompt_lengths,
    preserved_random_state,
    prompt_token_ids,
    sampling_values,
)
from verl.workers.rollout.checksum import tensor_checksum
from verl.workers.rollout.engine_group import EngineGroup
from verl.workers.rollout.engine_settings import check_parallel_sizes
from verl.workers.rollout.expansion import check_expansion
from verl.workers.rollout.server import FULL, GenerationRequest, RolloutServer, SamplingParams, TokenOutput
from verl.workers.rollout.server_replica import MOST_CALLS, cause_of_death
from verl.workers.rollout.sglang_rollout.engine_args import build_engine_args
from verl.workers.rollout.sglang_rollout.sglang_server import HybridSGLangServer
from verl.workers.rollout.weight_channel import SharedMemory, known_dtypes, layout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl.single_controller.base.actor import Ref
    from verl.workers.config import HFModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

_MEMORY = frozenset({"weights", "kv_cache"})
_GRACE_S = 10.0
"""How much longer a worker waits for the server than the server for its engine."""
_KEPT_VARIABLES = ("OMP_NUM_THREADS", "RAY_LOCAL_WORLD_SIZE", "VERL_FAULT", "VERL_FAULT_FILE")


class SGLangRollout(BaseRollout, RolloutServer):
    """One SGLang engine per tensor-parallel group; all ranks of a group get the same prompts.

    SGLang ends the process that owns an engine when the engine fails, so an actor owns it. The first rank of the group
    starts the actor and speaks for all; the actor ends with that rank.

    Args: without ``waits`` the engine may still be starting; see ``begin``.
    """

    facts = ENGINES["sglang"]
    server: Actor | None = None
    """The actor that has the methods of ``RolloutServer``; None on ranks that do not lead."""
    _server: Actor
    _ready: "Ref"

    def __init__(
        self,
        config: "RolloutConfig",
        model_config: "HFModelConfig",
        device_mesh: "DeviceMesh | None" = None,
        waits: bool = True,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        check_parallel_sizes(config)
        build_engine_args(config, model_config, is_hybrid=True)  # raises the errors that the actor would raise later
        self.run_step: int | None = None  # step of the trainer, for messages
        self.name = f"sglang_server_{envs.integer('RANK', 0) // config.tensor_model_parallel_size}"
        self._can_release = config.free_cache_engine and get_device_name() != "cpu"
        self._released: set[str] = set()
        self._is_paused = config.load_format == "dummy"
        self._memory: SharedMemory | None = None
        self._received: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._batches = itertools.count()
        # The worker's own thread may have an event loop, which Ray would block.
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="server-calls")
        self._group = EngineGroup(config.tensor_model_parallel_size)
        self.place: dict[str, Any] = {}
        self._began = time.perf_counter()
        devices = self._group.gathered(_device_of_this_process)
        self._group.by_leader(lambda: self._begin_server(devices))
        if waits:
            self.wait_until_started()
        if config.free_cache_engine and not self._can_release:
            logger.info("free_cache_engine has no effect: this device's engine cannot free memory between steps")

    # ---- the actor

    @classmethod
    def begin(cls, config: "RolloutConfig", model_config: "HFModelConfig") -> Self:
        """Start the actor, and return before its engine has started."""
        return cls(config, model_config, waits=False)

    @classmethod
    def starts_apart(cls) -> bool:
        """True on a CPU; on an accelerator the engine takes a share of the memory that is free when it starts."""
        return get_device_name() == "cpu"

    def wait_until_started(self) -> None:
        """Wait for the engine of the group.

        Raises: ServerError if its process has died, or is not ready in time; the error of its start.
        """
        limit_s = start_limit_s(self.config.server.max_start_wait_time, get_device_name())
        self.place = self._group.by_leader(lambda: dict(self._wait(self._ready, "its start", limit_s)))
        logger.info("SGLang engine started in %.1f s", time.perf_counter() - self._began)

    def _begin_server(self, devices: Sequence[str | None]) -> None:
        variables = {name: value for name in _KEPT_VARIABLES if (value := envs.read(name)) is not None}
        if None not in devices:
            variables[get_visible_devices_keyword()] = ",".join(str(device) for device in devices)
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray hides all devices from this actor
        here = ray.get_runtime_context().get_node_id()
        actor_class: Any = ray.remote(HybridSGLangServer)
        self.server = self._server = actor_class.options(
            num_cpus=0,
            num_gpus=0,
            max_concurrency=MOST_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": variables},
        ).remote(self.name, envs.integer("RANK", 0), self.config, self.model_config, self._is_paused)
        self._ready = self._server.ready.remote()

    def shutdown(self) -> None:
        """End the actor with its engine."""
        self._close_memory()
        if self.server is not None:
            ray.kill(self.server)  # type: ignore[arg-type]  # a handle, see `Actor`

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the server, which has a deadline for its engine.

        Raises: ServerError if the server is gone or silent; the error of the call.
        """
        limit_s = self.config.server.heartbeat_timeout if timeout_s is None else timeout_s
        return self._wait(getattr(self._server, method).remote(*args), method, limit_s + _GRACE_S)

    def _wait(self, ref: "Ref", what: str, limit_s: float) -> Any:
        try:
            return self._calls.submit(ray.get, ref, timeout=limit_s).result()
        except ray.exceptions.GetTimeoutError:
            raise ServerError(f"rollout server {self.name}: {what} has taken more than {limit_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise ServerError(f"rollout server {self.name}: its process has died: {cause_of_death(error)}") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the message of the cause does not begin with Ray's trace

    # ---- generation

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; see ``BaseRollout``.

        Raises: RuntimeError without usable weights, or if the engine turns images into other tokens than the data set;
            ValueError if a prompt is too long; ServerError if the engine is gone.
        """
        self._check_usable()
        token_ids = prompt_token_ids(prompts)
        room = self.config.context_length - self.config.response_length
        check_prompt_lengths(token_ids, tensors_of(prompts)["attention_mask"], room)
        media = prompts.non_tensor_batch.get("multi_modal_data")
        params = self._sampling_params(prompts)
        step = prompts.meta_info.get("global_steps")
        started = time.perf_counter()
        with preserved_random_state():
            outputs = self._group.by_leader(lambda: self._generate(token_ids, params, media, step))
        elapsed = time.perf_counter() - started
        check_expansion(prompts, [output.expanded_prompt_ids for output in outputs], "sglang")
        responses = [output.token_ids for output in outputs]
        log_probs = [output.log_probs or [] for output in outputs] if self.config.calculate_log_probs else None
        truncated = sum(output.finish_reason == FULL for output in outputs)
        return self._finished(prompts, responses, log_probs, elapsed, truncated)

    def _sampling_params(self, prompts: DataProto) -> list[SamplingParams]:
        common: dict[str, Any] = {
            "max_tokens": self.config.response_length,
            "ignore_eos": True,  # the batch gives eos_token_id
            "stop_token_ids": self._end_tokens(prompts),
            "logprobs": self.config.calculate_log_probs,
        } | sampling_values(prompts, self.config)
        seeds: Sequence[int | None] = self._sampling_seeds(prompts) or [None] * len(prompts)
        return [{**common, "seed": seed} for seed in seeds]

    def _generate(
        self, token_ids: list[list[int]], params: list[SamplingParams], media: np.ndarray | None, step: int | None
    ) -> list[TokenOutput]:
        if self._is_paused:
            self._ask("resume")
            self._is_paused = False
        shown = None if media is None else list(media)
        count_fetched(shown or ())  # the server on this node fetches them
        answer = self._server.generate_batch.remote(token_ids, params, f"batch {next(self._batches)}", shown)
        with on_failure(lambda error: ray.cancel(answer)):  # the next batch must not meet these requests
            fault_point("generate", rank=envs.integer("RANK", 0), step=step)
            return list(self._answer_of_living(answer))

    def _answer_of_living(self, answer: "Ref") -> Any:
        """Wait for an answer without a deadline, as long as the server lives."""
        pulse_s = self.config.server.heartbeat_timeout
        while not self._calls.submit(ray.wait, [answer], timeout=pulse_s).result()[0]:
            self._ask("health", pulse_s)
        return self._wait(answer, "an answer", pulse_s)

    # ---- single requests, which agent loops send to the actor themselves once it runs

    async def answer(self, request: GenerationRequest) -> TokenOutput:
        """Continue a prompt; see ``RolloutServer.answer``."""
        answer = self._server.answer.remote(request)
        with on_failure(lambda error: ray.cancel(answer)):  # also when the caller is cancelled
            output: TokenOutput = await answer
            return output

    async def abort(self, request_id: str) -> bool:
        """End the requests of this id: their callers get the tokens so far."""
        return bool(await self._server.abort.remote(request_id))

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return what the engine does; see ``RolloutServer.health``."""
        return dict(await self._server.health.remote(timeout_s))

    # ---- memory

    async def resume(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again; with the cache the engine runs again."""
        self._group.by_leader(lambda: self._resume(tags))
        self._released.difference_update(tags)

    def _resume(self, tags: list[str]) -> None:
        waking = [tag for tag in tags if tag in self._released]
        if waking:
            self._ask("resume_memory", waking)
        if "kv_cache" in tags:
            self._ask("set_step", self.run_step)
            if self._is_paused and self._usable:
                self._ask("resume")
                self._is_paused = False

    async def release(self, tags: list[str] | None = None) -> None:
        """Pause the engine, and free its memory if it can. The weights are then lost until the next sync."""
        awake = _MEMORY - self._released if self._can_release else set()
        self._group.by_leader(lambda: self._release(awake))
        if awake:
            self._released = set(_MEMORY)
            self._drop_weights()

    def _release(self, tags: Collection[str]) -> None:
        if not self._is_paused:
            self._ask("pause")
            self._is_paused = True
        if tags:
            self._ask("release", sorted(tags))

    # ---- weights

    def begin_update(self) -> None:
        """Pause the engine, and open the model for new weights."""
        super().begin_update()
        self._is_paused = True
        self._group.by_leader(lambda: self._ask("begin_update", self.run_step))

    def load(self, bucket: Bucket) -> None:
        """Let the engine load the next tensors; each of its processes takes its own shard of them.

        Raises: RuntimeError naming a tensor that the model lacks.
        """
        limit_s = self.config.server.heartbeat_timeout
        if get_device_name() == "cpu":
            if self._group.leads:
                self._memory = self._memory or SharedMemory()
                self._memory.fill(bucket)
                self._ask("load", layout_of(bucket), self._memory.path, limit_s, timeout_s=limit_s)
            return
        payloads = self._group.gathered(lambda: _handles_of(bucket))
        self._group.by_leader(lambda: self._ask("load_handles", payloads, limit_s, timeout_s=limit_s))

    def finish_update(self, version: int) -> None:
        """Complete the change, drop cached prefixes and record the version.

        Raises: RuntimeError naming tensors that did not arrive; the engine then rejects requests.
        """
        self._close_memory()
        limit_s = self.config.server.heartbeat_timeout
        found = self._group.by_leader(lambda: self._ask("finish_update", version, limit_s, timeout_s=limit_s))
        self._received = found["checksums"]
        self.unverified = found["unverified"]
        self._dtypes = known_dtypes(found["dtypes"])
        super().finish_update(version)

    def abort_update(self) -> None:
        """Abort the change; the engine rejects requests until a whole update has succeeded."""
        super().abort_update()
        self._close_memory()
        if self._group.leads:
            try:
                self._ask("abort_update")
            except ServerError as error:  # the update has failed already, maybe for this reason
                logger.warning("%s", error)

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return name and checksum of a tensor as it is sent; the engine compares it with its parts."""
        return name, tensor_checksum(tensor)

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the parameters that took a tensor in the last update; see ``BaseRollout``."""
        return self._dtypes.get(name)

    def weights_checksum(self) -> dict[str, int]:
        """Return the checksums of the tensors that arrived, after the engine has compared them with its parameters."""
        return self._received


ServerAdapter = SGLangRollout


def _device_of_this_process() -> str | None:
    """Return the number of this rank's accelerator among those of the node; None for a CPU."""
    if get_device_name() == "cpu":
        return None
    index = int(get_torch_device().current_device())
    visible = envs.read(get_visible_devices_keyword())
    return visible.split(",")[index] if visible else str(index)


def _handles_of(bucket: Bucket) -> str:
    """Return a bucket on the device of this rank in a form that the engine's process opens."""
    from verl.workers.rollout.sglang_rollout.importing import import_sglang

    import_sglang()
    from verl.workers.rollout.sglang_rollout.weights import serialized

    return serialized(bucket)
