"""Rewards: the manager, the overlong buffer, dynamic sampling, and the reward model."""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

from verl.base_config import Violation, parse_node
from verl.trainer.config.rules import remote_code
from verl.trainer.config.rules.batch import sharding_rules
from verl.trainer.config.rules.files import python_file_rules
from verl.trainer.config.rules.model import head_rules, packing_rules, sglang_rules, vision_rules
from verl.trainer.config.run_config import RunConfig
from verl.utils.json_types import Json
from verl.workers.config import OverlongBufferConfig, RewardModelConfig
from verl.workers.config.engines import SERVED_ROLLOUTS
from verl.workers.config.model import (
    path_problems,
    positions_of,
    quantized_problem,
    read_config_json,
)
from verl.workers.config.tokenizer_files import tokenizer_problems
from verl.workers.rewards.signature import MANAGER_KWARGS, SCORER_CALLS

NODE = "reward_model"
_KWARGS = f"{NODE}.reward_kwargs"
_BUFFER = f"{NODE}.overlong_buffer"
_WITHOUT_BUFFER = [name for name in SCORER_CALLS if "overlong_buffer_cfg" not in MANAGER_KWARGS.get(name, ())]
_SIZES = {f"{NODE}.n_gpus_per_node", f"{NODE}.nnodes", "trainer.n_gpus_per_node", "trainer.nnodes"}


# ---- the manager


def manager_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield arguments that the reward manager does not take, or that do not fit each other."""
    manager = run.reward_model.reward_manager
    given = run.reward_model.reward_kwargs
    if manager not in MANAGER_KWARGS:
        return
    known = MANAGER_KWARGS[manager]
    for key in given.keys() - set(known):
        expected = f"is not taken by the reward manager {manager!r}: write {' or '.join(known) or 'none'}"
        yield Violation(f"{_KWARGS}.{key}", given[key], expected)
    number = given.get("num_processes", 1)
    if not _is_count(number):
        yield Violation(f"{_KWARGS}.num_processes", number, "must be an integer of 1 or more")
    written = given.get("overlong_buffer_cfg")
    if written is None or manager != "dapo":
        return
    key = f"{_KWARGS}.overlong_buffer_cfg"
    if not isinstance(written, Mapping):
        yield Violation(key, written, "must be a mapping: set keys below it")
        return
    buffer, violations = parse_node(written, OverlongBufferConfig, key)
    yield from violations
    for name in ("enable", "len", "penalty_factor"):
        if name not in written:
            yield Violation(f"{key}.{name}", None, "is missing: write a value")
    limit = given.get("max_resp_len")
    if _is_count(limit):
        yield from _buffer_rules(buffer, key, f"{_KWARGS}.max_resp_len", limit)
    else:
        expected = "overlong_buffer_cfg needs it, an integer of 1 or more: write ${data.max_response_length}"
        yield Violation(f"{_KWARGS}.max_resp_len", limit, expected)


def _is_count(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ---- DAPO: the overlong buffer and dynamic sampling


def dapo_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield faults of the nodes that DAPO adds."""
    buffer = run.reward_model.overlong_buffer
    if buffer is not None and buffer.enable:
        yield from _buffer_rules(buffer, _BUFFER, "data.max_response_length", run.data.max_response_length)
        reward = run.reward_model
        if reward.reward_manager in _WITHOUT_BUFFER:
            expected = f"has no overlong buffer: write dapo, or {_BUFFER}.enable=false"
            yield Violation(f"{NODE}.reward_manager", reward.reward_manager, expected, others=(f"{_BUFFER}.enable",))
        for key in [key for key in ("overlong_buffer_cfg", "max_resp_len") if key in reward.reward_kwargs]:
            expected = f"is given by {_BUFFER}, which is enabled: write one of the two"
            yield Violation(f"{_KWARGS}.{key}", reward.reward_kwargs[key], expected)
    groups = run.algorithm.filter_groups
    if groups and groups.enable and groups.metric == "seq_final_reward" and run.algorithm.use_kl_in_reward:
        expected = "is the reward after KL, which differs for all responses and would keep every prompt"
        yield Violation("algorithm.filter_groups.metric", groups.metric, f"{expected}: write seq_reward")


def _buffer_rules(buffer: OverlongBufferConfig, node: str, limit_key: str, limit: int) -> Iterator[Violation]:
    """Reject a range or a penalty that punishes nothing; ``limit`` is the length of a response."""
    if not buffer.enable:
        return
    if not 0 < buffer.len <= limit:
        yield Violation(f"{node}.len", buffer.len, f"must be an integer in [1, {limit_key}={limit}]")
    if buffer.penalty_factor < 0 or (buffer.penalty_factor == 0 and not buffer.log):
        expected = "must be above 0; 0 is allowed with log=true, which then only reports"
        yield Violation(f"{node}.penalty_factor", buffer.penalty_factor, expected)


# ---- the reward model


def reward_model_rules(run: RunConfig, broken: set[str]) -> Iterator[Violation]:
    """Yield faults of an enabled reward model; rules that need a broken key are skipped."""
    reward = run.reward_model
    if not reward.enable:
        return
    sizes = ("n_gpus_per_node", "nnodes") if reward.enable_resource_pool else ()
    empty = [name for name in sizes if reward[name] < 1]
    for name in empty:
        expected = f"must be an integer of 1 or more with {NODE}.enable_resource_pool=true"
        yield Violation(f"{NODE}.{name}", reward[name], expected)
    if reward.model.input_tokenizer is not None and not run.data.return_raw_chat:
        expected = (
            f"must be true, so that the chat can be rendered for the reward model; or write {NODE}.model."
            "input_tokenizer=null if policy and reward model share tokenizer and chat template"
        )
        yield Violation("data.return_raw_chat", False, expected)
    engine_key = f"{NODE}.model.fsdp_config"
    workers = None if broken & _SIZES or empty else reward_world_size(run)
    if workers is not None and not broken & {f"{engine_key}.fsdp_size", f"{NODE}.ulysses_sequence_parallel_size"}:
        node = NODE if reward.enable_resource_pool else "trainer"
        shown = f"the {workers} workers of the reward model ({node}.n_gpus_per_node x {node}.nnodes)"
        sp_size = reward.ulysses_sequence_parallel_size
        fsdp_size = reward.model.fsdp_config.fsdp_size
        yield from sharding_rules(NODE, sp_size, engine_key, fsdp_size, workers, shown)
    yield from _model_rules(run, workers, broken)
    if reward.is_generative:
        yield from _judge_rules(reward, workers, broken)


def reward_world_size(run: RunConfig) -> int:
    """Return the number of workers of the reward model: those of its pool, or all."""
    reward = run.reward_model
    return reward.n_gpus_per_node * reward.nnodes if reward.enable_resource_pool else run.trainer.world_size


def _model_rules(run: RunConfig, workers: int | None, broken: set[str]) -> Iterator[Violation]:
    """Yield folders that hold no model or tokenizer, and sizes of the model that do not fit the run."""
    reward = run.reward_model
    key = f"{NODE}.model.path"
    tokenizer_key = f"{NODE}.model.input_tokenizer"
    path = reward.model.path
    tokenizer = reward.model.input_tokenizer
    if key in broken:
        return
    if tokenizer is not None:
        for problem in tokenizer_problems(tokenizer):
            yield Violation(tokenizer_key, tokenizer, problem)
    problems = list(path_problems(path))
    if not problems and tokenizer is not None:
        without = f"; or write {tokenizer_key}=null if the policy's tokens are the reward model's"
        problems = [problem + without for problem in tokenizer_problems(path)]
    if not problems and not reward.is_generative:
        problems = list(quantized_problem(read_config_json(path)))
    yield from (Violation(key, path, problem) for problem in problems)
    for name, other in reward.model.paths.items():
        if other != path:
            yield from (Violation(f"{NODE}.model.{name}", other, problem) for problem in path_problems(other))
    if not problems:
        hf_config = read_config_json(path)
        sharing = None if reward.is_generative else workers
        if reward.strategy != "megatron":
            yield from vision_rules(hf_config, (key, path), sharing)
        if reward.strategy != "megatron" and not reward.is_generative:
            trains = reward.model.optimizer is not None
            yield from packing_rules(reward.model, f"{NODE}.model", hf_config, run.trainer.device, trains)
        yield from remote_code.trust_rules(
            hf_config, path, f"{NODE}.model.trust_remote_code", reward.model.trust_remote_code
        )
        if reward.is_generative:
            yield from sglang_rules(f"{NODE}.name", reward.name, hf_config, run.trainer.device)
        else:
            yield from remote_code.value_model_rules(hf_config, key, path, "name a reward model of another family")
        yield from _size_rules(run, hf_config, broken)


def _size_rules(run: RunConfig, hf_config: Mapping[str, Json], broken: set[str]) -> Iterator[Violation]:
    """Yield sequences longer than the model's positions, and heads that do not divide over Ulysses ranks."""
    reward = run.reward_model
    positions = positions_of(hf_config)
    if positions is not None and not reward.is_generative:
        limit = reward.max_length
        shown = str(limit)
        if limit is None and not broken & {"data.max_prompt_length", "data.max_response_length"}:
            limit = run.data.max_prompt_length + run.data.max_response_length
            shown = f"data.max_prompt_length + data.max_response_length = {limit}"
        if limit is not None and limit > positions:
            expected = f"{shown} tokens exceed the {positions} positions of the reward model: write at most {positions}"
            yield Violation(f"{NODE}.max_length", reward.max_length, expected)
    if positions is not None and reward.is_generative and reward.name in SERVED_ROLLOUTS:
        name = "prompt_length" if reward.max_model_len is None else "max_model_len"
        longest = reward.max_model_len or reward.prompt_length + reward.response_length
        if longest > positions:
            sizes = "" if reward.max_model_len else f" plus answers of {reward.response_length} tokens"
            most = positions - (longest - reward[name])
            expected = f"{sizes} exceeds the {positions} positions of the reward model: write at most {most}"
            yield Violation(f"{NODE}.{name}", reward[name], expected.strip())
    key = f"{NODE}.ulysses_sequence_parallel_size"
    yield from head_rules(hf_config, key, reward.ulysses_sequence_parallel_size, "Ulysses ranks", "reward model")


def _judge_rules(reward: RewardModelConfig, workers: int | None, broken: set[str]) -> Iterator[Violation]:
    """Yield a generative reward model without its functions, or whose engines do not divide the workers."""
    functions = reward.data_processor_config
    key = f"{NODE}.data_processor_config"
    if functions.path is not None:
        for name in ("preprocess_fn_name", "postprocess_fn_name"):
            violations, _ = python_file_rules(f"{key}.path", functions.path, f"{key}.{name}", functions[name])
            yield from violations
    size = reward.tensor_model_parallel_size
    size_key = f"{NODE}.tensor_model_parallel_size"
    if workers is not None and size_key not in broken and reward.name in SERVED_ROLLOUTS and workers % size:
        yield Violation(size_key, size, f"must divide the {workers} workers of the reward model")
