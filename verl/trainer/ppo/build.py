"""Builds the trainer from a configuration, in the process of the task runner."""

import os

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import ResourcePoolManager, WorkerClasses
from verl.trainer.ppo.reward import load_reward_manager, reward_kwargs
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs


def build_trainer(
    config: DictConfig,
    role_worker_mapping: WorkerClasses,
    pools: ResourcePoolManager,
    group_cls: type[RayWorkerGroup],
    trainer_cls: type[RayPPOTrainer] = RayPPOTrainer,
) -> RayPPOTrainer:
    """Load tokenizer and reward functions, and build the trainer from them; it builds the data sets."""
    # An external module may register classes that the configuration names, so it comes before the rest.
    import_external_libs(config.actor_rollout_ref.model.external_lib)
    tokenizer, processor = load_tokenizer(config)
    return trainer_cls(
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=pools,
        ray_worker_group_cls=group_cls,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs(config)),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1, **reward_kwargs(config)),
        device_name=config.trainer.device,
    )


def load_tokenizer(config: DictConfig) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    """Return tokenizer and processor of the actor's model; the processor of a text model is None."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(os.path.expanduser(model.tokenizer_path or model.path), use_shm=model.use_shm)
    trust = config.data.trust_remote_code
    tokenizer = hf_tokenizer(path, trust_remote_code=trust)
    processor = hf_processor(path, trust_remote_code=trust, use_fast=True)
    if model.custom_chat_template:
        (processor or tokenizer).chat_template = model.custom_chat_template
    return tokenizer, processor
