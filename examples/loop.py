"""The whole of GRPO in one file, built on the public parts of verl.

python examples/tiny_model.py --save-dir outputs/loop/model
python examples/data_preprocess/gsm8k.py --source synthetic --local_save_dir outputs/loop/data
python examples/loop.py --model outputs/loop/model --data outputs/loop/data/train.parquet --out outputs/loop/run

It runs on a CPU. `python -m verl.trainer.main_ppo` takes the same steps to the same weights, and adds configuration,
checks, critics, checkpoints, validation and records. Copy and change this file to use verl from Python.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import ray
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from verl import DataProto
from verl.algos.advantage import compute_grpo_outcome_advantage
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import hf_tokenizer
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.device import get_device_name
from verl.utils.numerics.seeding import prompt_uids, sampling_seeds
from verl.workers.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker

SEED = 1


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Return the share of digits among the characters: a reward that even a model with random weights can learn."""
    return sum(each.isdigit() for each in solution_str) / max(1, len(solution_str))


def start_workers(options: argparse.Namespace) -> RayWorkerGroup:
    """Start the worker processes; each holds the policy, trains it with FSDP, and generates with the rollout engine."""
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=options.model),
        actor=FSDPActorConfig(
            strategy="fsdp",
            ppo_mini_batch_size=options.prompts,  # one update per step: the old policy equals the present one
            ppo_micro_batch_size_per_gpu=options.micro_batch,
            optim=FSDPOptimizerConfig(lr=options.lr),
        ),
        rollout=RolloutConfig(
            name=options.engine,
            n=options.samples,
            prompt_length=options.prompt_length,
            response_length=options.response_length,
            dtype="float32",
            tensor_model_parallel_size=1,
            log_prob_micro_batch_size_per_gpu=options.micro_batch,
        ),
    )
    device = get_device_name()
    pool = RayResourcePool([options.workers], use_gpu=device != "cpu", max_colocate_count=1)
    worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=config, role="actor_rollout")
    workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, device_name=device)
    workers.init_model()
    return workers


def prompts_of(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[DataProto]:
    """Yield batches of tokenized prompts without end, epoch after epoch."""
    config = DataConfig(max_prompt_length=options.prompt_length)
    dataset = RLHFDataset(options.data, tokenizer, config)
    loader = DataLoader(dataset, batch_size=options.prompts, drop_last=True, collate_fn=collate_fn)
    while True:
        yield from map(DataProto.from_single_dict, loader)


def generate(workers: RayWorkerGroup, prompts: DataProto, step: int, samples: int) -> DataProto:
    """Sample several responses to each prompt; the workers first sync the updated weights to the engine."""
    prompts.non_tensor_batch["uid"] = prompt_uids(SEED, step, len(prompts))
    asked = prompts.pop(["input_ids", "attention_mask", "position_ids"]).repeat(samples, interleave=True)
    asked.batch["sampling_seed"] = sampling_seeds(SEED, step, len(prompts), samples)
    asked.meta_info["global_steps"] = step
    answered = workers.generate_sequences(asked)
    batch = prompts.repeat(samples, interleave=True).union(answered)
    batch.meta_info["global_steps"] = step
    return batch


def add_rewards(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the token rewards (B, T): the score of a response is the reward of its last token."""
    mask = batch.batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    for row, (tokens, kept) in enumerate(zip(batch.batch["responses"], mask.bool(), strict=True)):
        text = tokenizer.decode(tokens[kept], skip_special_tokens=True)
        truth = batch.non_tensor_batch["reward_model"][row]["ground_truth"]
        last = int(kept.nonzero()[-1])
        rewards[row, last] = compute_score(batch.non_tensor_batch["data_source"][row], text, truth)
    batch.batch["token_level_rewards"] = rewards


def add_advantages(batch: DataProto) -> None:
    """Add the advantages (B, T), which compare each response with the other samples of its prompt."""
    batch.batch["advantages"], _ = compute_grpo_outcome_advantage(
        batch.batch["token_level_rewards"], batch.batch["response_mask"], index=batch.non_tensor_batch["uid"]
    )


def train(options: argparse.Namespace) -> None:
    """Repeat the steps of GRPO (generate, score, compare, update), then write the weights."""
    tokenizer = hf_tokenizer(options.model)
    workers = start_workers(options)
    prompts = prompts_of(options, tokenizer)
    for step in range(1, options.steps + 1):
        batch = generate(workers, next(prompts), step, options.samples)
        add_rewards(batch, tokenizer)
        add_advantages(batch)
        metrics = workers.update_actor(batch.select(non_tensor_batch_keys=[])).meta_info["metrics"]
        score = batch.batch["token_level_rewards"].sum(-1).mean().item()
        print(f"step {step}: score {score:.4f}, loss {np.mean(metrics['actor/pg_loss']):.6f}", flush=True)
    workers.save_checkpoint(options.out, None, options.steps)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--data", required=True, help="parquet file with the columns prompt, data_source, reward_model")
    parser.add_argument("--out", required=True, help="folder of the trained weights")
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm", "sglang"], help="generation engine (hf)")
    for name, default, text in (
        ("steps", 20, "training steps"),
        ("workers", 1, "processes that share model and batch"),
        ("prompts", 8, "prompts of a step"),
        ("samples", 4, "responses to each prompt"),
        ("micro-batch", 8, "responses of one forward pass"),
        ("prompt-length", 128, "tokens of the longest prompt"),
        ("response-length", 16, "tokens of the longest response"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (1e-3)")
    options = parser.parse_args()
    ray.init(include_dashboard=False)
    try:
        train(options)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
