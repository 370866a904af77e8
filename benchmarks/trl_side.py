"""Train with TRL for benchmarks/trl.py, which starts this script: GRPOTrainer, and one JSON line per step."""

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--inputs", type=Path, required=True, help="folder of model and prompts")
PARSER.add_argument("--progress", type=Path, required=True, help="file to which each step appends a line")
PARSER.add_argument("options", nargs="*", help="key=value in JSON, further arguments of GRPOConfig")
for option in ("steps", "prompts", "samples", "limit", "micro", "threads", "seed"):
    PARSER.add_argument(f"--{option}", type=int, required=True)


class StepLines(TrainerCallback):
    """A callback that appends the logged figures of each step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write a line once the figures of a step are complete."""
        if logs and "reward" in logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "time": time.time(), "data": logs}) + "\n")


def scorer() -> Any:
    """Return the reward function of countdown.py in the folder of this file."""
    spec = importlib.util.spec_from_file_location("countdown", Path(__file__).with_name("countdown.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


def main() -> None:
    """Train for the given number of steps."""
    args = PARSER.parse_args()
    torch.set_num_threads(args.threads)
    score = scorer()

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [score("countdown", completion, "") for completion in completions]

    batch = args.prompts * args.samples
    further = {key: json.loads(value) for key, _, value in (option.partition("=") for option in args.options)}
    settings: dict[str, Any] = {
        "output_dir": str(args.progress.parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": batch // args.micro,
        "num_generations": args.samples,
        "max_completion_length": args.limit,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": args.seed,
    }
    config = GRPOConfig(**settings | further)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.inputs / "model", attn_implementation="sdpa", trust_remote_code=False
        ),
        processing_class=AutoTokenizer.from_pretrained(args.inputs / "model", trust_remote_code=False),
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_json(str(args.inputs / "prompts.jsonl")),
        callbacks=[StepLines(args.progress)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
