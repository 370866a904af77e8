"""Files and models that a configuration names: are they there, and do their sizes fit?"""

import ast
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.refusals import select
from verl.trainer.config.scorers import scorer_rules
from verl.utils.import_utils import python_file
from verl.workers.config.model import (
    flat_overrides,
    path_problems,
    quantized_problem,
    read_config_json,
    tokenizer_problems,
)

Tree = Mapping[str, Any]


def file_rules(tree: Tree) -> Iterator[Violation]:
    """Yield data files and Python files that do not exist, functions that their file does not define, and folders
    that cannot be written.
    """
    yield from folder_rules(tree)
    yield from resume_rules(tree)
    yield from validation_file_rules(tree)
    for key in ("data.train_files", "data.val_files"):
        yield from data_file_rules(key, select(tree, key), required=key == "data.train_files")
    for node, path_key, name_key in (
        ("custom_reward_function", "path", "name"),
        ("data.custom_cls", "path", "name"),
        ("data.sampler", "class_path", "class_name"),
        ("data.datagen", "path", "name"),
    ):
        path, name = select(tree, f"{node}.{path_key}"), select(tree, f"{node}.{name_key}")
        if isinstance(path, str):
            yield from python_file_rules(tree, f"{node}.{path_key}", path, f"{node}.{name_key}", name)


WRITTEN = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
"""Keys of ``trainer`` that name folders of a run."""


def folder_rules(tree: Tree) -> Iterator[Violation]:
    """Yield folders of the run that are here, or would be made in one that is here, and cannot be written."""
    for name in WRITTEN:
        path = select(tree, f"trainer.{name}")
        if not isinstance(path, str) or not path or "://" in path:
            continue
        folder = os.path.abspath(os.path.expanduser(path))
        there = folder if os.path.exists(folder) else os.path.dirname(folder)
        if not os.path.exists(there):
            continue  # on a cluster the driver may run where it does
        if not os.path.isdir(there):
            yield Violation(f"trainer.{name}", path, f"must be a folder: {there} is a file")
        elif not os.access(there, os.W_OK | os.X_OK):
            yield Violation(f"trainer.{name}", path, f"{there} cannot be written: write a folder that can")


def resume_rules(tree: Tree) -> Iterator[Violation]:
    """Yield a checkpoint to resume from that does not exist."""
    path = select(tree, "trainer.resume_from_path")
    if select(tree, "trainer.resume_mode") == "resume_path":
        if not isinstance(path, str) or "global_step_" not in path:
            expected = "must name a global_step_<N> folder with trainer.resume_mode=resume_path"
            yield Violation("trainer.resume_from_path", path, expected)
        elif not os.path.isdir(os.path.expanduser(path)):
            yield Violation("trainer.resume_from_path", path, "no such folder: write a checkpoint's global_step_<N>")


def validation_file_rules(tree: Tree) -> Iterator[Violation]:
    """Yield a run that validates without a file."""
    validates = [name for name in ("val_before_train", "val_only") if select(tree, f"trainer.{name}")]
    test_freq = select(tree, "trainer.test_freq")
    if isinstance(test_freq, int) and test_freq > 0:
        validates.append("test_freq")
    if validates and "val_files" in tree["data"] and tree["data"]["val_files"] is None:
        asked = ", ".join(f"trainer.{name}" for name in validates)
        expected = f"{asked} ask{'s' if len(validates) == 1 else ''} for validation: name a file, or write "
        yield Violation("data.val_files", None, f"{expected}trainer.val_before_train=false and trainer.test_freq=-1")


def data_file_rules(key: str, value: Any, required: bool) -> Iterator[Violation]:
    """Yield the data files of one key that cannot be read."""
    files = [value] if isinstance(value, str) else value
    if files is None and not required:
        return
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        yield Violation(key, value, "must be a path or a list of paths of parquet files")
        return
    for file in files:
        expanded = os.path.expanduser(file)
        if "://" in file:
            continue
        if os.path.isdir(expanded):
            yield Violation(key, file, "is a folder: write the parquet file in it")
        elif not os.path.isfile(expanded):
            expected = "no such file: examples/data_preprocess/gsm8k.py writes one, or give the right path"
            yield Violation(key, file, expected)
        elif os.path.getsize(expanded) == 0:
            yield Violation(key, file, "is empty: write it again")


def python_file_rules(tree: Tree, path_key: str, path: str, name_key: str, name: Any) -> Iterator[Violation]:
    """Yield a Python file that is not there or cannot be parsed, and a name that it does not define."""
    file = python_file(path)
    if file is None:
        return  # importing an installed module is for the workers
    if not file.is_file():
        expected = "no such file: write the path of a Python file, or pkg:// and the name of an installed module"
        yield Violation(path_key, path, expected)
        return
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), file.name)
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        yield Violation(path_key, path, f"is not valid Python: {error}")
        return
    defined = {
        getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "asname", None)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Name | ast.alias)
    }
    stars = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(module))
    if path_key.startswith("custom_reward_function") and not stars:
        yield from scorer_rules(tree, module)
    if isinstance(name, str) and name not in defined and not stars:
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        yield Violation(name_key, name, f"{path} does not define it; it defines {', '.join(functions) or 'nothing'}")


def model_rules(tree: Tree, use_critic: bool) -> Iterator[Violation]:
    """Yield model paths that hold no model, and sizes of the model that do not fit the run."""
    roles = [("actor_rollout_ref.model", True)] + [("critic.model", False)] * use_critic
    if select(tree, "actor_rollout_ref.ref.model.path"):
        roles.append(("actor_rollout_ref.ref.model", False))
    for node, is_actor in roles:
        path = select(tree, f"{node}.path")
        if not isinstance(path, str):
            yield Violation(f"{node}.path", path, "must be a folder that save_pretrained wrote, or a hub id")
            continue
        problems = [Violation(f"{node}.path", path, problem) for problem in path_problems(path)]
        problems = problems or [
            Violation(f"{node}.path", path, problem) for problem in quantized_problem(read_config_json(path))
        ]
        yield from problems
        tokenizer = select(tree, f"{node}.tokenizer_path") or path
        if not problems and isinstance(tokenizer, str) and not node.startswith("actor_rollout_ref.ref"):
            yield from (Violation(f"{node}.tokenizer_path", tokenizer, text) for text in tokenizer_problems(tokenizer))
        if not problems:
            yield from _role_vision_rules(tree, node, read_config_json(path))
            yield from _blind_rules(tree, node, path)
        if is_actor and not problems:
            yield from _size_rules(tree, read_config_json(path))
    yield from _adapter_rules(tree, use_critic)


_VISION_KEYS = {
    "actor_rollout_ref.model": ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.freeze_vision_tower"),
    "actor_rollout_ref.ref.model": ("actor_rollout_ref.ref.strategy", None),
    "critic.model": ("critic.strategy", "critic.model.freeze_vision_tower"),
}
NO_VISION_ON_MEGATRON = (
    "trains language models only, its GPT model has no vision tower, and model.path names a vision-language model: "
    "write fsdp"
)
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those of ``verl.models.transformers.vision``, which the launching process does not import: it would import torch."""


def vision_rules(
    hf_config: Mapping[str, Any], strategy: tuple[str, Any], path: tuple[str, str], workers: Any
) -> Iterator[Violation]:
    """Yield a vision-language model where none is trained, and one of a family that several workers cannot share.

    Args: ``strategy`` and ``path`` are a key and its value.
    """
    if "vision_config" not in hf_config:
        return
    if strategy[1] == "megatron":
        yield Violation(*strategy, NO_VISION_ON_MEGATRON)
    elif hf_config.get("model_type") not in VISION_FAMILIES and isinstance(workers, int) and workers > 1:
        expected = (
            f"is of model_type {hf_config.get('model_type')!r}, whose vision tower {workers} workers cannot share, as "
            f"those without an image would not take part: name a model of {', '.join(VISION_FAMILIES)}, use one "
            "worker, or add the family (docs/advance/multi_modal.md)"
        )
        yield Violation(*path, expected)


def _role_vision_rules(tree: Tree, node: str, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Yield what ``vision_rules`` says of a role, and a frozen vision tower of a model that has none."""
    strategy_key, frozen_key = _VISION_KEYS[node]
    sizes = [select(tree, f"trainer.{name}") for name in ("n_gpus_per_node", "nnodes")]
    workers = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
    path_key = f"{node}.path"
    yield from vision_rules(
        hf_config, (strategy_key, select(tree, strategy_key)), (path_key, select(tree, path_key)), workers
    )
    if hf_config and "vision_config" not in hf_config and frozen_key and select(tree, frozen_key) is True:
        expected = f"needs a vision-language model, {node}.path names one of text (no vision_config): write false"
        yield Violation(frozen_key, True, expected)


def _blind_rules(tree: Tree, node: str, path: str) -> Iterator[Violation]:
    """Yield a model of text beside a policy that sees: it would read the tokens of images, and not the images."""
    policy, hf_config = select(tree, "actor_rollout_ref.model.path"), read_config_json(path)
    if isinstance(policy, str) and hf_config and "vision_config" not in hf_config:
        if not list(path_problems(policy)) and "vision_config" in read_config_json(policy):
            expected = "must see images as the policy of actor_rollout_ref.model.path does, and this is a model of text"
            yield Violation(f"{node}.path", path, f"{expected}: name a vision-language model")


def _adapter_rules(tree: Tree, use_critic: bool) -> Iterator[Violation]:
    for node in ["actor_rollout_ref.model"] + ["critic.model"] * use_critic:
        modules = select(tree, f"{node}.target_modules")
        if select(tree, f"{node}.lora_rank", 0) and not modules:
            yield Violation(
                f"{node}.target_modules", modules, "must name modules, or all-linear, with lora_rank above 0"
            )


def _size_rules(tree: Tree, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Yield a context that is too short, and heads that do not divide over the ranks that share them."""
    text = hf_config.get("text_config") or hf_config
    overrides = flat_overrides(select(tree, "actor_rollout_ref.model.override_config") or {})
    context = overrides.get("max_position_embeddings", text.get("max_position_embeddings"))
    rope = overrides.get("rope_scaling") or text.get("rope_scaling") or text.get("rope_parameters") or {}
    prompt, response = (select(tree, f"actor_rollout_ref.rollout.{name}_length") for name in ("prompt", "response"))
    if all(isinstance(number, int) for number in (context, prompt, response)) and not rope.get("factor"):
        if context < prompt + response:
            expected = (
                f"with prompts of {prompt} exceeds the model's {context} positions: write at most {context - prompt}"
            )
            yield Violation("data.max_response_length", response, expected)
    heads = text.get("num_attention_heads")
    for key, what in (
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "Ulysses ranks"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "tensor-parallel ranks"),
    ):
        size = select(tree, key)
        if isinstance(heads, int) and isinstance(size, int) and size > 1 and heads % size:
            if "tensor" in what and select(tree, "actor_rollout_ref.rollout.name") == "hf":
                continue
            yield Violation(key, size, f"the model's {heads} attention heads do not divide over {size} {what}")
