"""The reward model against the rest of the tree: its workers, its files, and the rows that it needs."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.base_config import Violation
from verl.trainer.config.files import python_file_rules, vision_rules
from verl.trainer.config.refusals import select
from verl.workers.config.model import path_problems, quantized_problem, read_config_json, tokenizer_problems

Tree = Mapping[str, Any]

NODE = "reward_model"
_SIZES = {f"{NODE}.n_gpus_per_node", f"{NODE}.nnodes", "trainer.n_gpus_per_node", "trainer.nnodes"}


def reward_model_rules(tree: Tree, broken: set[str]) -> Iterator[Violation]:
    """Yield what keeps an enabled reward model from running; rules that need a key in ``broken`` are left out."""
    node = tree[NODE]
    if node.get("enable") is not True:
        return
    yield from _pool_rules(node)
    yield from _row_rules(tree)
    sharing = {f"{NODE}.model.fsdp_config.fsdp_size", f"{NODE}.ulysses_sequence_parallel_size"}
    if not broken & (_SIZES | sharing) and not list(_pool_rules(node)):
        yield from _layout_rules(tree)
    yield from _model_rules(tree, broken)
    yield from _judge_rules(tree, broken)


def reward_world_size(tree: Tree) -> int:
    """Return the workers of the reward model: those of its own pool, or all."""
    node = tree[NODE] if tree[NODE].get("enable_resource_pool") else tree["trainer"]
    size: int = node["n_gpus_per_node"] * node["nnodes"]
    return size


def _pool_rules(node: Tree) -> Iterator[Violation]:
    if node.get("enable_resource_pool") is not True:
        return
    for name in ("n_gpus_per_node", "nnodes"):
        value = node.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            expected = f"must be an integer of 1 or more with {NODE}.enable_resource_pool=true"
            yield Violation(f"{NODE}.{name}", value, expected)


def _row_rules(tree: Tree) -> Iterator[Violation]:
    """Yield a change of template without the messages that it renders."""
    if select(tree, f"{NODE}.model.input_tokenizer") is not None and select(tree, "data.return_raw_chat") is not True:
        expected = (
            f"must be true, so that the chat can be rendered for the reward model; or write {NODE}.model."
            "input_tokenizer=null, where policy and reward model share tokenizer and chat template"
        )
        yield Violation("data.return_raw_chat", select(tree, "data.return_raw_chat"), expected)


def _layout_rules(tree: Tree) -> Iterator[Violation]:
    """Yield parallel sizes that do not divide the workers of the reward model."""
    world = reward_world_size(tree)
    node = NODE if tree[NODE].get("enable_resource_pool") else "trainer"
    workers = f"the {world} workers of the reward model ({node}.n_gpus_per_node x {node}.nnodes)"
    sp_size = tree[NODE].get("ulysses_sequence_parallel_size", 1)
    if isinstance(sp_size, int) and sp_size > 0 and world % sp_size:
        yield Violation(f"{NODE}.ulysses_sequence_parallel_size", sp_size, f"must divide {workers}")
    fsdp_size = select(tree, f"{NODE}.model.fsdp_config.fsdp_size", -1)
    if isinstance(fsdp_size, int) and 0 < fsdp_size < world and world % fsdp_size:
        yield Violation(f"{NODE}.model.fsdp_config.fsdp_size", fsdp_size, f"must divide {workers}, or be -1")


def _model_rules(tree: Tree, broken: set[str]) -> Iterator[Violation]:
    """Yield folders that hold no model or tokenizer, and sizes of the model that do not fit the run."""
    key, tokenizer_key = f"{NODE}.model.path", f"{NODE}.model.input_tokenizer"
    path, tokenizer = select(tree, key), select(tree, tokenizer_key)
    if not isinstance(path, str):
        yield Violation(key, path, "must be a folder that save_pretrained wrote, or a hub id")
        return
    if isinstance(tokenizer, str):
        for problem in tokenizer_problems(tokenizer):
            yield Violation(tokenizer_key, tokenizer, problem)
    problems = [Violation(key, path, problem) for problem in path_problems(path)]
    if not problems and tokenizer is not None:
        without = f"; or write {tokenizer_key}=null, where the policy's tokens are the reward model's"
        problems = [Violation(key, path, problem + without) for problem in tokenizer_problems(path)]
    if not problems and tree[NODE].get("model_type") != "generative":
        problems = [Violation(key, path, problem) for problem in quantized_problem(read_config_json(path))]
    yield from problems
    if not problems:
        hf_config = read_config_json(path)
        on_rollout_engine = tree[NODE].get("model_type") == "generative"
        unknown = on_rollout_engine or broken & _SIZES or list(_pool_rules(tree[NODE]))
        workers = None if unknown else reward_world_size(tree)
        yield from vision_rules(hf_config, (f"{NODE}.strategy", tree[NODE].get("strategy")), (key, path), workers)
        yield from _size_rules(tree, hf_config, broken)


def _size_rules(tree: Tree, hf_config: dict[str, Any], broken: set[str]) -> Iterator[Violation]:
    """Yield sequences beyond the positions of the model, and heads that do not divide over Ulysses ranks."""
    text = hf_config.get("text_config") or hf_config
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    positions, limit = text.get("max_position_embeddings"), tree[NODE].get("max_length")
    if isinstance(positions, int) and not rope.get("factor") and tree[NODE].get("model_type") != "generative":
        if limit is None and not broken & {"data.max_prompt_length", "data.max_response_length"}:
            limit = tree["data"]["max_prompt_length"] + tree["data"]["max_response_length"]
            shown = f"data.max_prompt_length + data.max_response_length = {limit}"
        else:
            shown = str(limit)
        if isinstance(limit, int) and limit > positions:
            expected = f"{shown} tokens exceed the {positions} positions of the reward model: write at most {positions}"
            yield Violation(f"{NODE}.max_length", tree[NODE].get("max_length"), expected)
    heads, sp_size = text.get("num_attention_heads"), tree[NODE].get("ulysses_sequence_parallel_size", 1)
    if isinstance(heads, int) and isinstance(sp_size, int) and sp_size > 1 and heads % sp_size:
        expected = f"the reward model's {heads} attention heads do not divide over {sp_size} Ulysses ranks"
        yield Violation(f"{NODE}.ulysses_sequence_parallel_size", sp_size, expected)


def _judge_rules(tree: Tree, broken: set[str]) -> Iterator[Violation]:
    """Yield what a generative reward model lacks: a file with its functions, and workers that its engines divide."""
    node = tree[NODE]
    if node.get("model_type") != "generative":
        return
    functions, key = node.get("data_processor_config") or {}, f"{NODE}.data_processor_config"
    if isinstance(functions.get("path"), str):
        for name in ("preprocess_fn_name", "postprocess_fn_name"):
            function = functions.get(name, name.removesuffix("_fn_name"))
            yield from python_file_rules(tree, f"{key}.path", functions["path"], f"{key}.{name}", function)
    size = node.get("tensor_model_parallel_size", 2)
    layout = {f"{NODE}.n_gpus_per_node", f"{NODE}.nnodes", f"{NODE}.tensor_model_parallel_size"}
    if not broken & layout and node.get("name", "vllm") == "vllm" and not list(_pool_rules(node)):
        world = reward_world_size(tree)
        if isinstance(size, int) and size > 0 and world % size:
            yield Violation(
                f"{NODE}.tensor_model_parallel_size", size, f"must divide the {world} workers of the reward model"
            )


def score_notices(tree: Tree) -> Iterator[str]:
    """Yield what an enabled reward model leaves without the effect that one might expect."""
    if tree[NODE].get("enable") is not True:
        return
    managers = ("naive", "batch", "dapo", "prime")
    if select(tree, "custom_reward_function.path") and tree[NODE].get("reward_manager") in managers:
        yield (
            "the reward model scores training, and custom_reward_function validation only: to join both, write a "
            "reward manager that reads rm_scores (docs/reward_models.md)"
        )
