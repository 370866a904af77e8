"""Keys that exist for established commands and ask for something that this version does not support."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from verl.base_config import Violation, as_yaml
from verl.trainer.config.keys import is_under, select
from verl.trainer.config.run_config import ABSENT, RunConfig, default_of
from verl.workers.config import MultiTurnConfig

ROLLOUT = "actor_rollout_ref.rollout"


class Unsupported(NamedTuple):
    """Keys below ``node`` that must keep their default or, with ``values``, must not have one of these."""

    node: str
    names: tuple[str, ...]
    text: str
    values: tuple[Any, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The dotted keys."""
        return [f"{self.node}.{name}" for name in self.names]


_TURNS = tuple(name for name in MultiTurnConfig() if name != "_target_")
_NO_TURNS = "multi-turn rollout is not supported yet"
_NO_AGENTS = "agent loops are not supported yet"
_NO_SGLANG = "is read by SGLang, which is not supported yet"
_TRAINS = "is not supported for a role that trains"

UNSUPPORTED = [
    Unsupported(ROLLOUT, ("mode",), "is not supported yet: write sync", ("async",)),
    Unsupported(ROLLOUT, ("name",), "is not supported yet: write vllm or hf", ("sglang",)),
    Unsupported(f"{ROLLOUT}.multi_turn", _TURNS, _NO_TURNS),
    Unsupported(f"{ROLLOUT}.agent", ("num_workers", "default_agent_loop", "agent_loop_config_path"), _NO_AGENTS),
    Unsupported(f"{ROLLOUT}.agent.custom_async_server", ("path", "name"), _NO_AGENTS),
    Unsupported(ROLLOUT, ("over_sample_rate", "engine_kwargs.sglang", "sglang_engine_mode", "server"), _NO_SGLANG),
    Unsupported(
        ROLLOUT,
        ("data_parallel_size",),
        "is not supported: each group of tensor_model_parallel_size workers has one engine and its share of the batch",
    ),
    Unsupported("actor_rollout_ref.actor", ("fsdp_config.forward_only", "megatron.forward_only"), _TRAINS),
    Unsupported("critic", ("model.fsdp_config.forward_only", "megatron.forward_only"), _TRAINS),
    Unsupported(
        "critic.model.fsdp_config",
        ("entropy_from_logits_with_chunking",),
        "is not supported: a critic computes no entropy",
    ),
    Unsupported(
        "algorithm.filter_groups",
        ("enable",),
        "is not supported here: dynamic sampling is done by python -m recipe.dapo.main_dapo",
    ),
    Unsupported(
        "data",
        ("tokenizer",),
        "is only supported with data.custom_cls: name the tokenizer in actor_rollout_ref.model.tokenizer_path",
    ),
    Unsupported("data", ("return_raw_input_ids",), "is only supported with data.custom_cls"),
    Unsupported(
        "data", ("return_multi_modal_inputs",), "is not supported: training reads the tensors of the image processor"
    ),
]

_READ_BY_CUSTOM_DATASETS = ("data.tokenizer", "data.return_raw_input_ids")


def unsupported_rules(
    run: RunConfig, tree: Mapping[str, Any], recipe_nodes: Collection[str] = ()
) -> Iterator[Violation]:
    """Yield every key that asks for something not supported; nodes that the recipe reads are left to it."""
    custom = _READ_BY_CUSTOM_DATASETS if run.data.custom_cls.path else ()
    for entry in UNSUPPORTED:
        for key in entry.keys:
            value = select(tree, key, ABSENT)
            if value is ABSENT or is_under(key, recipe_nodes) or key in custom:
                continue
            default = default_of(run, key)
            if entry.values:
                if value in entry.values:
                    yield Violation.unsupported(key, value, entry.text)
            elif default is not ABSENT and value != default:
                instead = "leave it out" if isinstance(default, Mapping) else f"write {as_yaml(default)}"
                yield Violation.unsupported(key, value, f"{entry.text}: {instead}")
