"""Reinforcement learning: ``python -m verl.trainer.main_ppo key=value ...``.

The launching process checks the configuration, starts Ray and waits for the task runner, an actor in which the
trainer runs. It imports neither torch nor transformers.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, cast

import psutil
from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation
from verl.trainer.config.async_training import MODES, SYNC
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.asynchronous import complete
from verl.trainer.config.rules.files import RUN_FOLDERS
from verl.trainer.config.run_config import RunConfig, needs_reference
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.run import prestart
from verl.trainer.run.clock import CLOCK
from verl.trainer.run.display import LocalDisplay, Terminal, attach_to_launch
from verl.trainer.run.variables import MEGATRON_ENV_VARS
from verl.utils.failures import on_failure
from verl.utils.import_utils import import_external_libs, lazy_exports
from verl.utils.json_types import JsonObject
from verl.utils.masking import masked
from verl.workers.config.rollout import serves

if TYPE_CHECKING:
    from ray.actor import ActorClass

    from verl.single_controller.base.actor import Actor
    from verl.single_controller.ray import RayWorkerGroup
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.resources import ResourcePoolManager
    from verl.trainer.ppo.utils import WorkerClass
    from verl.trainer.run.watch import Watch

logger = logging.getLogger(__name__)
RunnerClass: TypeAlias = "type[TaskRunner] | ActorClass[TaskRunner]"


_FACTORY = "verl.utils.dataset.factory"
__getattr__ = lazy_exports(__name__, {"create_rl_dataset": _FACTORY, "create_rl_sampler": _FACTORY})  # they need torch


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Run PPO with the composed configuration."""
    if config.async_training.mode == SYNC:
        run_ppo(config)
    else:
        run_async(config)


def run_async(config: DictConfig) -> None:
    """Train while servers generate, as ``run_ppo``."""
    complete(config)
    run_ppo(config, FullyAsyncTaskRunner)


# ---- the launching process


def check_mode(config: DictConfig, task_runner_class: "RunnerClass | None") -> None:
    """Refuse a mode of asynchronous training in which the trainer of a recipe would take turns all the same.

    Raises: ConfigError.
    """
    mode = OmegaConf.select(config, "async_training.mode", default=SYNC)
    modes = getattr(task_runner_class or TaskRunner, "modes", None)  # None: a Ray actor class
    if modes is not None and mode not in modes:
        raise ConfigError([Violation("async_training.mode", mode, f"must be {' or '.join(modes)} with this command")])


def run_ppo(config: DictConfig, task_runner_class: "RunnerClass | None" = None) -> None:
    """Check the configuration, start Ray unless it runs already, and train to the end.

    ``task_runner_class`` is a plain class derived from ``TaskRunner``, or a Ray actor class.

    Raises: SystemExit after a short message on standard error: with 2 for a wrong input, otherwise with 1. If the run
        had started, the whole trace is in ``error.log`` of ``trainer.default_local_dir``.
    """
    from verl.trainer.config.invocation import only_checks
    from verl.trainer.config.rules.megatron import megatron_engines
    from verl.trainer.preflight import check_inputs
    from verl.trainer.run.ending import Ending
    from verl.trainer.run.refusal import checked, end_of_checks
    from verl.trainer.run.resume import run_folder
    from verl.utils.process.owner import Ownership

    CLOCK.moments = []
    CLOCK.mark("launch", at=float(psutil.Process().create_time()))
    CLOCK.mark("imports")

    def check() -> tuple[RunConfig, LocalDisplay, Ending]:
        check_mode(config, task_runner_class)
        recipe_nodes = getattr(task_runner_class, "recipe_nodes", None)  # None: a Ray actor class
        recipe_rules = getattr(task_runner_class, "recipe_rules", None)
        of_fork = task_runner_class is not None and not recipe_nodes and not recipe_rules
        run_config = check_inputs(config, recipe_nodes or (), of_fork, recipe_rules)
        folders = {f"trainer.{name}": run_config.trainer[name] for name in RUN_FOLDERS}
        owner.take_folders(folders, is_elsewhere=not run_config.ray_kwargs.is_local)
        options = run_config.trainer
        path = options.resume_from_path if options.resume_mode == "resume_path" else None
        ending = Ending(
            run_folder(config),
            options.resume_mode,
            path,
            options.report,
            options.save_on_sigterm_s,
            is_here=run_config.ray_kwargs.is_local,
        )
        return run_config, LocalDisplay(run_config.trainer.live_view, run_folder(config)), ending

    forks = prestart.fork_server_of(config, has_own_runner=task_runner_class is not None)
    with Ownership(takes=not only_checks()) as owner, forks or nullcontext() as fork_server:
        run_config, display, ending = checked(check)
        end_of_checks()
        CLOCK.mark("checks")
        from verl.trainer.run.launch import run_on_ray  # this imports Ray

        runner_class = task_runner_class or TaskRunner
        run_on_ray(
            run_config.ray_kwargs,
            run_config.trainer.device,
            run_folder(config),
            partial(_run_in_actor, config, run_config, runner_class, Terminal(display)),
            display,
            run_config.trainer.worker_call_timeout_s,
            run_config.trainer.prometheus,
            fork_server,
            ending,
            MEGATRON_ENV_VARS if megatron_engines(run_config) else {},
        )


def _run_in_actor(
    config: DictConfig, run_config: RunConfig, runner_class: "RunnerClass", terminal: Terminal, watch: "Watch"
) -> None:
    import ray

    CLOCK.mark("ray_init")
    if not isinstance(runner_class, ray.actor.ActorClass):
        runner_class = ray.remote(num_cpus=0 if run_config.trainer.device == "cpu" else 1)(runner_class)
    runner = cast("Actor", runner_class.options(**_controller_options(run_config)).remote())
    with on_failure(lambda error: ray.kill(runner)):  # type: ignore[arg-type]  # a handle, see `Actor`
        runner.__ray_call__.remote(attach_to_launch, terminal.name, CLOCK.moments, watch.activity_path)
        terminal.watch(runner.run.remote(config), watch)


def _controller_options(run_config: RunConfig) -> JsonObject:
    """Return the actor options with which nsys traces the task runner; empty if nsys is off.

    The checks before the start have refused ``tool=nsys`` without the package nvtx.
    """
    profiler = run_config.global_profiler
    if run_config.trainer.device != "cuda" or profiler.tool != "nsys" or not profiler.steps:
        return {}
    from verl.utils.profiler.captures import nsight_options, save_folder

    options = (profiler.global_tool_config or {})["nsys"]["controller_nsight_options"]
    save_folder(profiler.save_path).mkdir(parents=True, exist_ok=True)  # nsys makes none
    return {"runtime_env": {"nsight": nsight_options(options, profiler.save_path, "controller")}}


# ---- the task runner


class TaskRunner:
    """Builds workers, data and trainer, and trains; recipes derive from it and override a method.

    Attributes: ``role_worker_mapping`` (role to Ray actor class) and ``mapping`` (role to the name of its pool).
        ``modes`` are the values of ``async_training.mode`` that its trainer has; others are refused.
        ``recipe_nodes`` names nodes of the configuration that a recipe reads and the main trainer refuses.
        ``recipe_rules``, a static method, yields settings that the recipe refuses. If a class has neither of the two,
        the checks before the start accept settings that only its code can judge.
    """

    modes: tuple[str, ...] = (SYNC,)
    recipe_nodes: tuple[str, ...] = ()
    recipe_rules: "Callable[[RunConfig], Iterable[Violation]] | None" = None

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, WorkerClass] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type["RayWorkerGroup"]]:
        """Choose the worker of actor and rollout; returns its class and that of its worker group."""
        from verl.single_controller.ray import RayWorkerGroup

        workers = _workers_of(config.actor_rollout_ref.actor.strategy)
        rollout = OmegaConf.select(config, "actor_rollout_ref.rollout")
        is_served = rollout is not None and serves(rollout)
        cls = workers.AsyncActorRolloutRefWorker if is_served else workers.ActorRolloutRefWorker
        self._add(Role.ActorRollout, cls)
        return cls, RayWorkerGroup

    def add_critic_worker(self, config: DictConfig) -> None:
        """Choose the worker of the critic, if one is trained."""
        if need_critic(config):
            self._add(Role.Critic, _workers_of(config.critic.strategy).CriticWorker)

    def init_resource_pool_mgr(self, config: DictConfig) -> "ResourcePoolManager":
        """Create the manager of the resource pools: ``global_pool``, and ``reward_pool`` if configured."""
        from verl.trainer.ppo.resources import ResourcePoolManager

        spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        reward = config.reward_model
        if reward.enable and reward.enable_resource_pool:
            spec["reward_pool"] = [reward.n_gpus_per_node] * reward.nnodes
        return ResourcePoolManager(resource_pool_spec=spec, mapping=self.mapping, device_name=config.trainer.device)

    def add_reward_model_worker(self, config: DictConfig) -> None:
        """Choose the worker of the reward model, if one is enabled."""
        reward = config.reward_model
        if reward.enable:
            pool = "reward_pool" if reward.enable_resource_pool else "global_pool"
            self._add(Role.RewardModel, _workers_of(reward.strategy).RewardModelWorker, pool)

    def add_ref_policy_worker(self, config: DictConfig, ref_policy_cls: type) -> None:
        """Choose the worker of the reference policy, if a KL term needs one."""
        if needs_reference(config.algorithm.use_kl_in_reward, config.actor_rollout_ref.actor.use_kl_loss):
            self._add(Role.RefPolicy, ref_policy_cls)

    def _add(self, role: Role, cls: type, pool: str = "global_pool") -> None:
        import ray

        self.role_worker_mapping[role] = ray.remote(cls)
        self.mapping[role] = pool

    def trainer_class(self) -> type["RayPPOTrainer"]:
        """Choose the trainer; imported here, since that takes seconds."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        return RayPPOTrainer

    def _build_trainer(
        self, config: DictConfig, pools: "ResourcePoolManager", group_cls: type["RayWorkerGroup"]
    ) -> "RayPPOTrainer":
        """Load tokenizer, data sets and reward functions, and build the trainer from them."""
        from verl.trainer.ppo.loaders import complete_data_node
        from verl.trainer.ppo.reward import load_reward_manager, reward_kwargs
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.chat_template import check_template
        from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.utils.dataset.vision_utils import templater_of
        from verl.utils.fs import copy_to_local
        from verl.utils.hub import cached_folder, model_folder

        model = config.actor_rollout_ref.model
        import_external_libs(model.external_lib)  # may register classes that the configuration names
        given = os.path.expanduser(model.tokenizer_path or model.path)
        was_checked = cached_folder(given) is not None
        path = copy_to_local(model_folder(given), use_shm=model.use_shm)
        trust = config.data.trust_remote_code
        tokenizer = hf_tokenizer(path, trust_remote_code=trust)
        processor = hf_processor(path, trust_remote_code=trust, use_fast=True)
        if model.custom_chat_template:
            (processor or tokenizer).chat_template = model.custom_chat_template
        complete_data_node(config)
        data = config.data
        if not was_checked:  # the model was not on this machine when the run was checked
            check_template(data.apply_chat_template_kwargs, templater_of(tokenizer, processor).chat_template)
        train_dataset = create_rl_dataset(data.train_files, data, tokenizer, processor)
        val_dataset = data.val_files and create_rl_dataset(data.val_files, data, tokenizer, processor, is_train=False)
        return self.trainer_class()(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=group_cls,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs(config)),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1, **reward_kwargs(config)),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(data, train_dataset),
            device_name=config.trainer.device,
        )

    def run(self, config: DictConfig) -> None:
        """Build everything and train to the end.

        The worker processes start and import their modules while this one loads tokenizer and data.
        """
        from verl.trainer.config.keys import tree_of
        from verl.trainer.ppo.profiling import absolute_save_paths
        from verl.trainer.ppo.resources import start_workers_early

        CLOCK.mark("task_runner")
        OmegaConf.resolve(config)
        absolute_save_paths(config)
        logger.info("configuration:\n%s", OmegaConf.to_yaml(OmegaConf.create(masked(tree_of(config, resolve=False)))))
        actor_rollout_cls, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        pools = self.init_resource_pool_mgr(config)
        workers = start_workers_early(config, self.role_worker_mapping, pools, ray_worker_group_cls)
        CLOCK.mark("worker_imports")

        trainer = self._build_trainer(config, pools, ray_worker_group_cls)
        CLOCK.mark("tokenizer_and_data")
        trainer.init_workers(workers.result(trainer.config, trainer.total_training_steps) if workers else None)
        trainer.fit()


class FullyAsyncTaskRunner(TaskRunner):
    """The workers and data of ``TaskRunner``, with a trainer that trains while the servers generate."""

    modes = tuple(mode for mode in MODES if mode != SYNC)
    recipe_nodes = ("rollout",)  # by which established commands set servers and length

    def trainer_class(self) -> type["RayPPOTrainer"]:
        """Choose the asynchronous trainer."""
        from verl.trainer.asynchronous.trainer import AsyncTrainer

        return AsyncTrainer


def _workers_of(strategy: str) -> ModuleType:
    """Import the workers of a strategy; Megatron-Core's can also report their position in the parallel layout."""
    return importlib.import_module(f"verl.workers.{'megatron' if strategy == 'megatron' else 'fsdp'}_workers")


if __name__ == "__main__":
    prestart.start_early(sys.argv[1:])
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module("verl.trainer.main_ppo").main()
