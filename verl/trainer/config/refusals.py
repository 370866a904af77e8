"""What the configuration can spell and this version does not do: each key, when it is refused, what to write."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from verl.base_config import Violation, as_yaml
from verl.trainer.config.keys import is_under


class Refusal(NamedTuple):
    """A key that must keep its default or, where ``values`` are given, must not have one of them."""

    key: str
    default: Any
    text: str
    values: tuple[Any, ...] | None = None


ROLLOUT = "actor_rollout_ref.rollout"
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", ROLLOUT, "critic", "reward_model")

_CHOICES = [
    Refusal(f"{ROLLOUT}.mode", "sync", "is not supported yet: write sync", ("async",)),
    Refusal(f"{ROLLOUT}.name", "vllm", "is not supported yet: write vllm or hf", ("sglang",)),
]

_FIXED: list[tuple[str, str, dict[str, Any]]] = [
    (
        "multi-turn rollout is not supported yet",
        f"{ROLLOUT}.multi_turn",
        {
            "enable": False,
            "max_assistant_turns": None,
            "tool_config_path": None,
            "max_user_turns": None,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "interaction_config_path": None,
            "use_inference_chat_template": False,
            "tokenization_sanity_check_mode": "strict",
            "format": "hermes",
            "num_repeat_rollouts": None,
        },
    ),
    (
        "agent loops are not supported yet",
        f"{ROLLOUT}.agent",
        {
            "num_workers": 8,
            "default_agent_loop": "single_turn_agent",
            "agent_loop_config_path": None,
            "custom_async_server.path": None,
            "custom_async_server.name": None,
        },
    ),
    (
        "is read by SGLang, which is not supported yet",
        ROLLOUT,
        {"over_sample_rate": 0, "engine_kwargs.sglang": {}, "sglang_engine_mode": "local", "server": None},
    ),
    (
        "is not supported: each group of tensor_model_parallel_size workers has its engine and its share of the batch",
        ROLLOUT,
        {"data_parallel_size": 1},
    ),
    (
        "is not supported for a role that trains",
        "",
        {"actor_rollout_ref.actor.fsdp_config.forward_only": False, "critic.model.fsdp_config.forward_only": False},
    ),
    (
        "is not supported: a critic computes no entropy",
        "critic.model.fsdp_config",
        {"entropy_from_logits_with_chunking": False},
    ),
    (
        "is not supported here: dynamic sampling is done by python -m recipe.dapo.main_dapo",
        "algorithm.filter_groups",
        {"enable": False},
    ),
    (
        "is not supported for a role that trains",
        "",
        {"actor_rollout_ref.actor.megatron.forward_only": False, "critic.megatron.forward_only": False},
    ),
    (
        "is not supported but by a data set of your own (data.custom_cls), name the tokenizer in "
        "actor_rollout_ref.model.tokenizer_path",
        "data",
        {"tokenizer": None},
    ),
    ("is not supported but by a data set of your own (data.custom_cls)", "data", {"return_raw_input_ids": False}),
    ("is not supported: training reads what they hold", "data", {"return_multi_modal_inputs": True}),
]

_READ_BY_CUSTOM_DATASETS = ("data.tokenizer", "data.return_raw_input_ids")

REFUSALS: list[Refusal] = _CHOICES + [
    Refusal(f"{node}.{name}".removeprefix("."), default, f"{text}: write {as_yaml(default)}")
    for text, node, defaults in _FIXED
    for name, default in defaults.items()
]


def refused(tree: Mapping[str, Any], recipe_nodes: Collection[str] = ()) -> Iterator[Violation]:
    """Yield every key of a resolved tree that asks for something not supported yet, but for nodes of the recipe."""
    custom = _READ_BY_CUSTOM_DATASETS if select(tree, "data.custom_cls.path") else ()
    for refusal in REFUSALS:
        if is_under(refusal.key, recipe_nodes) or refusal.key in custom:
            continue
        value = select(tree, refusal.key, refusal.default)
        wrong = value in refusal.values if refusal.values is not None else value != refusal.default
        if wrong:
            yield Violation.unsupported(refusal.key, value, refusal.text)


def select(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or ``default`` where the tree has none."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node
