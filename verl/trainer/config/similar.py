"""Suggest existing keys for a key that does not exist, by its last part and by names that other projects use."""

from collections.abc import Collection
from difflib import SequenceMatcher

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_LR = (f"{_ACTOR}.optim.lr", "critic.optim.lr", "optim.lr")
_BATCH = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")
_MICRO = (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu")
_MODEL_PATH = (f"{_MODEL}.path", "model.path", "model.partial_pretrain")
_STEPS = ("trainer.total_training_steps",)
_TRAIN_FILES = ("data.train_files",)
_VAL_FILES = ("data.val_files",)
_RESPONSE = ("data.max_response_length", "rollout.response_length")
_PROMPT = ("data.max_prompt_length", "rollout.prompt_length")
_LENGTH = ("data.max_length", *_PROMPT, *_RESPONSE)
_SAMPLES = (f"{_ROLLOUT}.n", "rollout.n", "data.n_samples")
_GPUS = ("trainer.n_gpus_per_node",)
_WARMUP = (f"{_ACTOR}.optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
_KL = (f"{_ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef")
_CLIP = (f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high")
_OUTPUT = ("trainer.default_local_dir", "data.output_path")
_TENSOR_PARALLEL = (f"{_ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_model_parallel_size")
_CHECKPOINTING = (f"{_MODEL}.enable_gradient_checkpointing", "model.enable_gradient_checkpointing")
_RESUME = ("trainer.resume_from_path", "trainer.resume_mode")

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "learning_rate": _LR,
    "batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "rollout_batch_size": _BATCH,
    "mini_batch_size": (f"{_ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
    "micro_batch_size": _MICRO,
    "per_device_train_batch_size": _MICRO,
    "gradient_accumulation_steps": _MICRO,
    "model_path": _MODEL_PATH,
    "model_name": _MODEL_PATH,
    "model_name_or_path": _MODEL_PATH,
    "pretrained_model": _MODEL_PATH,
    "tokenizer": (f"{_MODEL}.tokenizer_path", "model.tokenizer_path"),
    "epochs": ("trainer.total_epochs",),
    "num_epochs": ("trainer.total_epochs",),
    "num_train_epochs": ("trainer.total_epochs",),
    "max_steps": _STEPS,
    "num_steps": _STEPS,
    "train_file": _TRAIN_FILES,
    "train_data": _TRAIN_FILES,
    "dataset": _TRAIN_FILES,
    "val_file": _VAL_FILES,
    "test_files": _VAL_FILES,
    "eval_files": _VAL_FILES,
    "max_new_tokens": _RESPONSE,
    "max_tokens": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_seq_length": _LENGTH,
    "num_generations": _SAMPLES,
    "n_samples_per_prompt": _SAMPLES,
    "group_size": _SAMPLES,
    "n_gpu": _GPUS,
    "n_gpus": _GPUS,
    "num_gpus": _GPUS,
    "num_nodes": ("trainer.nnodes",),
    "save_steps": ("trainer.save_freq",),
    "eval_steps": ("trainer.test_freq",),
    "warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP,
    "max_grad_norm": (f"{_ACTOR}.grad_clip", "optim.clip_grad"),
    "beta": _KL,
    "kl_coef": _KL,
    "cliprange": _CLIP,
    "clip_eps": _CLIP,
    "output_dir": _OUTPUT,
    "save_dir": _OUTPUT,
    "run_name": ("trainer.experiment_name",),
    "report_to": ("trainer.logger",),
    "tensor_parallel_size": _TENSOR_PARALLEL,
    "tp_size": _TENSOR_PARALLEL,
    "gradient_checkpointing": _CHECKPOINTING,
    "resume_from_checkpoint": _RESUME,
    "reward_function": ("custom_reward_function.path",),
}
"""Last part of a key, as other programs name it -> the keys of ours."""

_LEAST_RATIO = 0.75
_LEAST_LETTERS = 3  # a shorter word is part of many names


def similar_keys(key: str, known: Collection[str], count: int = 3) -> list[str]:
    """Return known keys that resemble ``key``, the most similar first."""
    last = key.rpartition(".")[2]
    usual = [each for each in USUAL_NAMES.get(last.lower(), ()) if each in known]
    ranks = {each: _likeness(last.lower(), each.rpartition(".")[2].lower()) for each in known}
    alike = [each for each, rank in ranks.items() if rank]
    alike.sort(key=lambda each: (ranks[each], SequenceMatcher(None, key, each).ratio()), reverse=True)
    best = ranks[alike[0]] if alike else 0.0
    kept = [each for each in alike if ranks[each] > 0.8 * best]
    return [*dict.fromkeys(usual or kept)][:count]


def _likeness(name: str, other: str) -> float:
    """Return the similarity of two last parts of keys, from 0 (unrelated) to 1 (equal)."""
    if name == other:
        return 1.0
    words = set(name.split("_"))
    others = set(other.split("_"))
    is_part = words < others and max(map(len, words)) >= _LEAST_LETTERS
    if is_part or (others < words and len(others) > 1):
        return 0.9
    ratio = SequenceMatcher(None, name, other).ratio()
    return ratio if ratio >= _LEAST_RATIO else 0.0
