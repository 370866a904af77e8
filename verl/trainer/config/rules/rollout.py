"""The generation engine: lengths, sampling, and the log-probs that training compares with."""

import os
from collections.abc import Iterator

from verl.base_config import Violation, nearest
from verl.errors import WrongInput
from verl.experimental.agent_loop.registry import known_names, read_agent_loops
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.interactions.utils.interaction_registry import read_interactions_file
from verl.tools.function_tool import function_names
from verl.tools.utils.tool_registry import read_tools_file
from verl.trainer.config.rules.files import python_file_rules
from verl.trainer.config.run_config import RunConfig
from verl.utils import envs
from verl.workers.config.engines import ENGINES, SERVED_ROLLOUTS
from verl.workers.config.rollout import MAX_LORA_RANK_VLLM, RolloutConfig

_KEY = "actor_rollout_ref.rollout"
_NEEDED = ("prompt_length", "response_length", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "temperature")


def rollout_rules(run: RunConfig, broken: set[str]) -> Iterator[Violation]:
    """Yield engine sizes that cannot hold a prompt with its response, and sampling that training cannot follow."""
    if broken & {f"{_KEY}.{name}" for name in _NEEDED} or "actor_rollout_ref.model.lora_rank" in broken:
        return
    rollout = run.actor_rollout_ref.rollout
    needed = rollout.prompt_length + rollout.response_length
    longest = rollout.context_length
    if longest < needed:
        expected = f"must be null or at least prompt_length + response_length = {needed}"
        yield Violation(f"{_KEY}.max_model_len", longest, expected)
    if rollout.name in SERVED_ROLLOUTS:
        yield from _pass_rules(rollout, longest)
    if rollout.temperature == 0:
        expected = "must be above 0, training divides logits by it; to validate greedily set val_kwargs.do_sample=false"
        yield Violation(f"{_KEY}.temperature", rollout.temperature, expected)
    rank = run.actor_rollout_ref.model.lora_rank
    if rollout.name == "vllm" and rank > MAX_LORA_RANK_VLLM:
        yield Violation("actor_rollout_ref.model.lora_rank", rank, f"must be at most {MAX_LORA_RANK_VLLM} with vllm")


def server_rules(run: RunConfig, broken: set[str]) -> Iterator[Violation]:
    """Yield standalone servers that no engine can be, and a class of servers that cannot be found."""
    shared = run.actor_rollout_ref
    rollout = shared.rollout
    custom = rollout.agent.custom_async_server
    key = f"{_KEY}.agent.custom_async_server"
    if (custom.path is None) != (custom.name is None):
        missing = "path" if custom.path is None else "name"
        yield Violation(f"{key}.{missing}", None, "is missing: write path and name, or neither")
    elif custom.path is not None:
        yield from python_file_rules(f"{key}.path", custom.path, f"{key}.name", custom.name)[0]
    if shared.hybrid_engine:
        return
    hybrid = "actor_rollout_ref.hybrid_engine"
    no_servers = ENGINES.keys() - {*SERVED_ROLLOUTS}
    if f"{_KEY}.mode" not in broken and (not rollout.serves or rollout.name in no_servers):
        expected = f"needs servers: write {_KEY}.mode=async and {_KEY}.name=vllm or sglang, or {hybrid}=true"
        yield Violation(hybrid, False, expected, others=(f"{_KEY}.mode", f"{_KEY}.name"))
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "n_gpus_per_node")
    if broken & {f"{_KEY}.{name}" for name in sizes}:
        return
    size = rollout.workers_per_engine
    if rollout.n_gpus_per_node % size:
        expected = f"must be a multiple of tensor_model_parallel_size x data_parallel_size = {size}, one server"
        yield Violation(f"{_KEY}.n_gpus_per_node", rollout.n_gpus_per_node, expected)


def agent_loop_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield deadlines that come too late, a file of loops that cannot be read, and a default loop of no class."""
    rollout = run.actor_rollout_ref.rollout
    if not rollout.serves:
        return
    agent = rollout.agent
    names = known_names()
    call_s = run.trainer.worker_call_timeout_s
    step_s = agent.step_timeout_s
    if agent.on_failure in ("drop", "replace") and not (step_s and step_s < call_s):
        expected = f"must be below trainer.worker_call_timeout_s={call_s:g} with on_failure={agent.on_failure}, else a "
        expected += "trajectory that hangs ends the run before it is given up: lower it, or raise the other"
        yield Violation(f"{_KEY}.agent.step_timeout_s", step_s, expected, others=("trainer.worker_call_timeout_s",))
    if agent.agent_loop_config_path:
        try:
            names += read_agent_loops(os.path.expanduser(agent.agent_loop_config_path))
        except WrongInput as error:
            yield Violation(f"{_KEY}.agent.agent_loop_config_path", agent.agent_loop_config_path, str(error))
            return
    if agent.default_agent_loop not in names and not _registers_more(run):
        expected = f"is no agent loop: write one of {', '.join(sorted(names))}, or name its class in a YAML file"
        key = f"{_KEY}.agent.agent_loop_config_path"
        yield Violation(f"{_KEY}.agent.default_agent_loop", agent.default_agent_loop, expected, others=(key,))


def multi_turn_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield turns without a server, an unknown format of calls, and files of tools that cannot be read."""
    rollout = run.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    key = f"{_KEY}.multi_turn"
    has_own_loops = rollout.serves and (rollout.agent.agent_loop_config_path or _registers_more(run))
    if turns.num_repeat_rollouts is not None and not has_own_loops:
        expected = (
            "is read by agent loops such as collabllm_agent of recipe/collabllm: name one in "
            "agent.agent_loop_config_path, with mode=async; the built-in loops sample each row rollout.n times"
        )
        yield Violation(f"{key}.num_repeat_rollouts", turns.num_repeat_rollouts, expected)
    if not rollout.serves:
        if turns.enable:
            expected = f"needs {_KEY}.mode=async: an agent loop makes the turns"
            yield Violation(f"{key}.enable", True, expected, others=(f"{_KEY}.mode",))
        return
    names = ToolParser.names()
    if turns.format not in names and not _registers_more(run):
        near = ", ".join(nearest(turns.format, names)) or "none"
        expected = f"is no format of tool calls: write one of {', '.join(names)} (the nearest: {near})"
        yield Violation(f"{key}.format", turns.format, expected)
    files = {
        "tool_config_path": read_tools_file,
        "function_tool_path": function_names,
        "interaction_config_path": read_interactions_file,
    }
    for name, read in files.items():
        path = turns[name]
        if path:
            try:
                read(path)
            except WrongInput as error:
                yield Violation(f"{key}.{name}", path, str(error))


def _registers_more(run: RunConfig) -> bool:
    """Whether the user names a module, which may register loops and parsers when it is imported."""
    return bool(run.actor_rollout_ref.model.external_lib or envs.read("VERL_USE_EXTERNAL_MODULES"))


def _pass_rules(rollout: RolloutConfig, longest: int) -> Iterator[Violation]:
    """Yield a token limit per engine step that is too small for its sequences, or for a prompt that must fit."""
    key = f"{_KEY}.max_num_batched_tokens"
    tokens = rollout.max_num_batched_tokens
    chunked = f"{_KEY}.enable_chunked_prefill"
    if not rollout.enable_chunked_prefill and tokens < longest:
        expected = f"must be at least the {longest} tokens of the longest sequence with enable_chunked_prefill=false"
        yield Violation(key, tokens, f"{expected}: raise it, or write enable_chunked_prefill=true", others=(chunked,))
    elif rollout.name == "vllm" and tokens < rollout.max_num_seqs:
        expected = f"must be at least max_num_seqs={rollout.max_num_seqs}, a token for each sequence: raise it, or"
        yield Violation(key, tokens, f"{expected} lower max_num_seqs", others=(f"{_KEY}.max_num_seqs",))


_BYPASS = "actor_rollout_ref.actor.use_rollout_log_probs"


def bypass_rules(run: RunConfig) -> Iterator[Violation]:
    """Reject the rollout's log-probs as old log-probs if it returns none, or if both are compared."""
    if not run.actor_rollout_ref.actor.use_rollout_log_probs:
        return
    if not run.actor_rollout_ref.rollout.calculate_log_probs:
        expected = f"must be true with {_BYPASS}=true, which reads them"
        yield Violation(
            f"{_KEY}.calculate_log_probs", False, f"{expected}: write true, or false there", others=(_BYPASS,)
        )
    if run.algorithm.rollout_is_threshold is not None:
        expected = f"must be null with {_BYPASS}=true: the ratio of the loss holds the weights already"
        threshold = run.algorithm.rollout_is_threshold
        yield Violation("algorithm.rollout_is_threshold", threshold, expected, others=(_BYPASS,))
    if run.trainer.lazy_columns:
        yield Violation(_BYPASS, True, "cannot be combined with trainer.lazy_columns=true: write false for one of them")


def importance_weight_rules(run: RunConfig) -> Iterator[Violation]:
    """Reject rollout importance weights without a threshold, or without the log-probs that they need."""
    threshold = run.algorithm.rollout_is_threshold
    if threshold is None and run.algorithm.rollout_is:
        yield Violation("algorithm.rollout_is", True, "needs algorithm.rollout_is_threshold: write a limit such as 2.0")
    if threshold is not None and not run.actor_rollout_ref.rollout.calculate_log_probs:
        key = f"{_KEY}.calculate_log_probs"
        expected = (
            f"must be true with algorithm.rollout_is_threshold={threshold}, which compares the log-probs of rollout "
            "and training: write true, or set algorithm.rollout_is_threshold=null"
        )
        yield Violation(key, False, expected, others=("algorithm.rollout_is_threshold",))
