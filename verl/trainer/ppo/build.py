"""The trainer and what it is made of, in the process of the task runner."""

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl.trainer.ppo.loaders import follow_rollout, follow_run_seed
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import ResourcePoolManager
from verl.trainer.ppo.reward import load_reward_manager, reward_kwargs
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs


def build_trainer(
    config: DictConfig,
    role_worker_mapping: Mapping[Any, Any],
    pools: ResourcePoolManager,
    group_cls: type,
    trainer_cls: type[RayPPOTrainer] = RayPPOTrainer,
) -> RayPPOTrainer:
    """Load tokenizer, data and reward functions, and make the trainer of them."""
    follow_run_seed(config)
    follow_rollout(config)
    import_external_libs(config.actor_rollout_ref.model.get("external_lib"))  # may register what is named below
    tokenizer, processor = load_tokenizer(config)
    data = config.data
    train_dataset = create_rl_dataset(data.train_files, data, tokenizer, processor)
    return trainer_cls(
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=pools,
        ray_worker_group_cls=group_cls,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs(config)),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1, **reward_kwargs(config)),
        train_dataset=train_dataset,
        val_dataset=data.val_files and create_rl_dataset(data.val_files, data, tokenizer, processor, is_train=False),
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(data, train_dataset),
        device_name=config.trainer.device,
    )


def load_tokenizer(config: DictConfig) -> tuple[Any, Any]:
    """Return tokenizer and processor of the actor's model; the processor is None for a text model."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(
        os.path.expanduser(model.get("tokenizer_path") or model.path), use_shm=model.get("use_shm", False)
    )
    trust = config.data.get("trust_remote_code", False)
    tokenizer = hf_tokenizer(path, trust_remote_code=trust)
    processor = hf_processor(path, trust_remote_code=trust, use_fast=True)
    template = model.get("custom_chat_template")
    if template:
        (processor or tokenizer).chat_template = template
    return tokenizer, processor
