"""Start the fork server of a run (``ray_kwargs.fork_workers``): a process that imports while the launching process
checks and starts Ray.

This module is light, since a launch imports it first.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.trainer.run.variables import LOOPBACK_ENV_VARS, MEGATRON_ENV_VARS, unset_variables
from verl.utils import envs
from verl.utils.fork_server.starter import ForkServer, has_accelerators

logger = logging.getLogger(__name__)

_FIRST = (
    "torch",
    "tensordict",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torchvision.io",
    "datasets",
)
_GENERAL = (
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.resources",
    "verl.workers.fsdp_workers",
    "verl.workers.rewards.managers",
    "verl.utils.dataset.rl_dataset",
)
_VLLM = (
    "verl.workers.rollout.vllm_rollout.importing:import_vllm",
    "vllm.model_executor.model_loader",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.entrypoints.launchers.cli_args",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
)
"""Modules that cost time: first those that do not import ray, which has to wait until its cluster runs."""


class _Plan(NamedTuple):
    """Settings of the fork server of a run; ``engine`` is the rollout engine of the workers, if they are forked.

    ``last_of_general`` and ``last_of_workers`` are the numbers of processes of each kind, if they are known: the server
    itself becomes the last process. With ``only_trainer`` the server becomes the trainer, which is the first process.
    """

    engine: str
    strategies: frozenset[str]
    last_of_general: int | None
    last_of_workers: int | None
    device: str = "cpu"
    only_trainer: bool = False

    def start(self) -> ForkServer | None:
        """Start the server with the modules of the engine and the strategies; None, with a warning, if it cannot be."""
        general = [*_GENERAL, *(["verl.workers.megatron_workers"] if "megatron" in self.strategies else [])]
        workers = _VLLM if self.engine == "vllm" else ()
        more = LOOPBACK_ENV_VARS | (MEGATRON_ENV_VARS if "megatron" in self.strategies else {})
        environment = {**envs.mapping(), **unset_variables(self.device, more)}
        last = self.last_of_general, self.last_of_workers
        try:
            return ForkServer(
                environment,
                _FIRST,
                general,
                workers,
                *last,
                only_first=self.only_trainer,
                assumed=_OF_TRAINER if self.only_trainer else {},
                absent=_without_use_on_a_cpu() if self.device == "cpu" else (),
            )
        except OSError as error:  # for instance no room for its sockets, or a folder whose path is too long for them
            logger.warning("no fork server could be started, so Ray starts the processes of the run: %s", error)
            return None


def _without_use_on_a_cpu() -> list[str]:
    """Return installed packages that torch and vLLM import but a CPU cannot use: Triton without a CPU backend."""
    spec = importlib.util.find_spec("triton")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return ["triton"] if folders and not any(Path(folder, "backends/cpu").exists() for folder in folders) else []


_OF_TRAINER = {"OMP_NUM_THREADS": "1"}
"""What Ray sets in the process of the trainer, which has one core, unless it is set."""

_early: tuple[_Plan, ForkServer] | None = None
_COMMON = _Plan("vllm", frozenset({"fsdp"}), 1, 1)
_UNCOMMON = ("-", "ray_kwargs.fork_workers=", "actor_rollout_ref.rollout.mode=", "actor_rollout_ref.hybrid_engine=")
"""Beginnings of command-line words whose effect on the fork server only the composed configuration shows."""


def start_early(words: Sequence[str]) -> None:
    """Start the fork server before the configuration is composed, if the command line is that of a common run."""
    global _early
    common = {"trainer.device=cpu", "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=1"}
    others = [word for word in words if word != "ray_kwargs.fork_workers=true"]
    if not common <= {*words} or any(word.startswith(_UNCOMMON) for word in others):
        return
    if sys.platform == "linux" and not envs.read("RAY_ADDRESS") and not has_accelerators():
        started = _COMMON.start()
        _early = None if started is None else (_COMMON, started)


def fork_server_of(config: Any, has_own_runner: bool = False) -> ForkServer | None:
    """Return the fork server for the composed configuration; None if Ray starts the processes by itself.

    Ray does so if the configuration asks for that, or where no fork server is possible. A configuration that asks for a
    fork server then is refused by the checks. ``has_own_runner``: the task runner is that of a recipe, which may start
    any processes.
    """
    from verl.trainer.config.invocation import only_checks

    global _early
    early = _early
    _early = None
    try:
        plan = None if only_checks() else _plan_of(config, has_own_runner)
    except Exception:  # the checks, which come next, say what is wrong with the configuration
        plan = None
    if early is not None and early[0] == plan:
        return early[1]
    if early is not None:
        early[1].stop()
    return plan.start() if plan is not None else None


def _plan_of(config: Any, has_own_runner: bool) -> _Plan | None:
    from omegaconf import OmegaConf

    from verl.trainer.config.rules.fork_workers import KEY, obstacles
    from verl.workers.config.rollout import serves

    def get(key: str) -> Any:
        return OmegaConf.select(config, key)

    is_wanted = get(KEY) is None or get(KEY) is True
    joins = any((get(f"{node}.nnodes") or 1) > 1 for node in ("trainer", "reward_model", "actor_rollout_ref.rollout"))
    if (
        joins
        or not is_wanted
        or any(obstacles(get("trainer.device"), get("ray_kwargs.ray_init") or {}, get("global_profiler.tool")))
    ):
        return None
    strategies = {get("actor_rollout_ref.actor.strategy"), get("critic.strategy")}
    kinds = frozenset("megatron" if strategy == "megatron" else "fsdp" for strategy in strategies)
    if get("trainer.device") == "cuda":  # a process that has opened the CUDA driver cannot be forked
        if has_own_runner:
            if get(KEY):
                logger.warning("%s=true has no effect on a GPU with the task runner of a recipe", KEY)
            return None
        return _Plan("", kinds, None, None, "cuda", only_trainer=True)
    is_hybrid = bool(get("actor_rollout_ref.hybrid_engine"))
    engine = str(get("actor_rollout_ref.rollout.name")) if is_hybrid else ""
    has_one_pool = is_hybrid and not get("reward_model.enable_resource_pool")
    is_alone = engine == "vllm" and not serves(get("actor_rollout_ref.rollout")) and not has_own_runner
    # Of several workers none becomes the parent of the others, which would end with it.
    of_workers = 1 if get("trainer.n_gpus_per_node") == 1 and has_one_pool and not has_own_runner else None
    return _Plan(engine, kinds, 1 if is_alone and has_one_pool else None, of_workers)
