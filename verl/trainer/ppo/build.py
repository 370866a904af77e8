"""The trainer and what it is made of, in the process of the task runner."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl.trainer.ppo.loaders import follow_run_seed, set_total_training_steps
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.resources import ResourcePoolManager, WorkerStart
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.fs import copy_to_local


def build_trainer(
    config: DictConfig, role_worker_mapping: Mapping[Any, Any], pools: ResourcePoolManager, group_cls: type
) -> tuple[RayPPOTrainer, WorkerStart | None]:
    """Return the trainer, and the start of its workers where that could begin before the data were loaded."""
    follow_run_seed(config)
    early_steps = steps_known_early(config)
    workers = None
    if early_steps is not None:
        set_total_training_steps(config, early_steps)
        workers = WorkerStart(config.copy(), role_worker_mapping, pools, group_cls, config.trainer.device)
    tokenizer, processor = load_tokenizer(config)
    data = config.data
    train_dataset = create_rl_dataset(data.train_files, data, tokenizer, processor)
    trainer = RayPPOTrainer(
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
    if early_steps is not None and early_steps != trainer.total_training_steps:
        raise RuntimeError(
            f"the data set gives {trainer.total_training_steps} steps where its files gave {early_steps}: set "
            "trainer.total_training_steps"
        )
    return trainer, workers


def load_tokenizer(config: DictConfig) -> tuple[Any, Any]:
    """Return tokenizer and processor of the actor's model; the processor is None for a text model."""
    model = config.actor_rollout_ref.model
    path = copy_to_local(model.get("tokenizer_path") or model.path, use_shm=model.get("use_shm", False))
    trust = config.data.get("trust_remote_code", False)
    tokenizer = hf_tokenizer(path, trust_remote_code=trust)
    processor = hf_processor(path, trust_remote_code=trust, use_fast=True)
    template = model.get("custom_chat_template")
    if template:
        (processor or tokenizer).chat_template = template
    return tokenizer, processor


def reward_kwargs(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of the reward manager that the configuration gives."""
    return dict(config.reward_model.get("reward_kwargs") or {})


def steps_known_early(config: DictConfig) -> int | None:
    """Return the number of training steps where it can be told without loading the data, else None.

    It stands in the configuration that workers are constructed with, so they can start early only when it is known.
    """
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    data = config.data
    changed = (
        data.get("filter_overlong_prompts", True)
        or (data.get("custom_cls") or {}).get("path")
        or (data.get("datagen") or {}).get("path")
        or (data.get("sampler") or {}).get("class_path")
    )
    if changed:
        return None
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import as_file_list, localize

    rows = sum(pq.read_metadata(path).num_rows for path in localize(as_file_list(data.train_files)))
    return rows // data.get("gen_batch_size", data.train_batch_size) * config.trainer.total_epochs
