"""Launch the fork: ``python -m fork.main_fork key=value ...``."""

import os
import socket
from pprint import pprint

import hydra
import ray
from fork import algorithms  # noqa: F401  # registers the estimator and the loss
from omegaconf import OmegaConf

from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import is_cuda_available


@hydra.main(config_path="config", config_name="fork_trainer", version_base=None)
def main(config):
    """Train by the composed configuration."""
    run_fork(config)


def run_fork(config):
    """Start Ray and wait for the task runner."""
    if not ray.is_initialized():
        defaults = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}}
        given = config.ray_kwargs.get("ray_init", {})
        runtime_env = OmegaConf.merge(defaults, given.get("runtime_env", {}))
        ray.init(**OmegaConf.to_container(OmegaConf.create({**given, "runtime_env": runtime_env})))
    try:
        if is_cuda_available and config.global_profiler.tool == "nsys" and config.global_profiler.steps:
            options = OmegaConf.to_container(config.global_profiler.global_tool_config.nsys.controller_nsight_options)
            runner = TaskRunner.options(runtime_env={"nsight": options}).remote()
        else:
            runner = TaskRunner.remote()
        ray.get(runner.run.remote(config))
    finally:
        if ray.is_initialized():
            ray.shutdown()


@ray.remote(num_cpus=1)
class TaskRunner:
    """Builds everything and trains."""

    def run(self, config):
        """Map the roles to workers, load the data, and fit."""
        from fork.trainer import ForkTrainer
        from fork.workers import FrozenEmbeddingWorker

        from verl.single_controller.ray import RayWorkerGroup
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.utils.fs import copy_to_local
        from verl.workers.fsdp_workers import CriticWorker

        print(f"task runner on {socket.gethostname()}, process {os.getpid()}")
        pprint(OmegaConf.to_container(config, resolve=True))
        OmegaConf.resolve(config)

        assert config.actor_rollout_ref.actor.strategy in {"fsdp", "fsdp2"}
        assert config.critic.strategy in {"fsdp", "fsdp2"}
        roles = {
            Role.ActorRollout: ray.remote(FrozenEmbeddingWorker),
            Role.Critic: ray.remote(CriticWorker),
        }
        pool = "global_pool"
        mapping = {Role.ActorRollout: pool, Role.Critic: pool}
        if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
            roles[Role.RefPolicy] = ray.remote(FrozenEmbeddingWorker)
            mapping[Role.RefPolicy] = pool
        validate_config(
            config=config, use_reference_policy=need_reference_policy(roles), use_critic=need_critic(config)
        )
        pools = ResourcePoolManager(
            resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}, mapping=mapping
        )

        path = copy_to_local(config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.use_shm)
        tokenizer = hf_tokenizer(path, trust_remote_code=config.data.get("trust_remote_code", False))
        processor = hf_processor(path, trust_remote_code=config.data.get("trust_remote_code", False), use_fast=True)
        limits = {
            "max_resp_len": config.data.max_response_length,
            "overlong_buffer_cfg": config.reward_model.overlong_buffer,
        }
        reward_fn = load_reward_manager(config, tokenizer, 0, **limits)
        val_reward_fn = load_reward_manager(config, tokenizer, 1, **limits)
        train_set = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor)
        val_set = create_rl_dataset(config.data.val_files, config.data, tokenizer, processor)
        trainer = ForkTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=roles,
            resource_pool_manager=pools,
            ray_worker_group_cls=RayWorkerGroup,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_set,
            val_dataset=val_set,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_set),
        )
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    main()
