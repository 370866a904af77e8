"""The ``override_*_config`` keys of roles on Megatron-Core against its fields.

They are read from its source: importing it takes seconds.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from verl.base_config import Violation

TRANSFORMER = ("transformer/transformer_config.py", "model_parallel_config.py")
DDP = ("distributed/distributed_data_parallel_config.py",)
OPTIMIZER = ("optimizer/optimizer_config.py",)

OF_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)
OF_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("activation_func", "gated_linear_unit", "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "multi_latent_attention", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_router_topk", "moe_router_score_function", "moe_shared_expert_intermediate_size"),
)
OF_ENGINE = (
    *("params_dtype", "pipeline_dtype", "bf16", "fp16", "calculate_per_token_loss", "variable_seq_lengths"),
    *("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device"),
)


@cache
def mcore_fields(files: tuple[str, ...]) -> frozenset[str]:
    """Return the annotated names of the classes in files of the installed Megatron-Core; empty where there is none."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        return frozenset()
    names: set[str] = set()
    for file in files:
        path = Path(found.submodule_search_locations[0], file)
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    names.add(field.target.id)
    return frozenset(names)


def override_rules(node: Mapping[str, Any], key: str, model: str) -> Iterator[Violation]:
    """Yield keys of a ``megatron`` node's overrides that Megatron-Core does not have, or that are not read there.

    ``key`` is that of the node and ``model`` the one of the role's model.
    """
    overrides = node.get("override_transformer_config") or {}
    at = f"{key}.override_transformer_config"
    yield from _unknown(overrides, at, TRANSFORMER, "TransformerConfig")
    for name, value in overrides.items():
        if name in OF_LAYOUT:
            yield Violation(f"{at}.{name}", value, f"stands one level higher: write {key}.{name}")
        elif name in OF_MODEL:
            expected = f"is of the model, which generates too: write what config.json has in {model}.override_config"
            yield Violation(f"{at}.{name}", value, expected)
        elif name in OF_ENGINE and value is not None:
            yield Violation(f"{at}.{name}", value, "is set by the engine: leave it out")
    yield from _unknown(
        node.get("override_ddp_config") or {}, f"{key}.override_ddp_config", DDP, "DistributedDataParallelConfig"
    )


def optimizer_rules(node: Mapping[str, Any], key: str) -> Iterator[Violation]:
    """Yield keys of an ``optim`` node's overrides that Megatron-Core does not have."""
    overrides = node.get("override_optimizer_config") or {}
    yield from _unknown(overrides, f"{key}.override_optimizer_config", OPTIMIZER, "OptimizerConfig")


def _unknown(overrides: Mapping[str, Any], key: str, files: tuple[str, ...], kind: str) -> Iterator[Violation]:
    known = mcore_fields(files)
    for name in (each for each in overrides if known and each not in known):
        near = get_close_matches(name, known, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        yield Violation(f"{key}.{name}", overrides[name], f"is no field of megatron-core's {kind}{hint}")


def stage_problem(layers: int, pp: int, stages: int, overrides: Mapping[str, Any]) -> tuple[str | None, str] | None:
    """Return why ``layers`` cannot be cut into ``pp`` stages of ``stages`` virtual ones each: the key among
    ``overrides``, or None for the sizes, and what is wrong; None where they can.
    """
    ends = {
        name: overrides[name]
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if overrides.get(name) is not None
    }
    counted = [
        name
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        if overrides.get(name)
    ]
    if overrides.get("pipeline_model_parallel_layout") is not None:  # Megatron-Core reads it whole
        return None
    for name in (*ends, *counted):
        if pp < 2:
            return name, "needs pipeline_model_parallel_size of 2 or more"
        if ends and counted:
            return counted[0], f"cannot stand beside {next(iter(ends))}: leave one of them out"
    for name, count in ends.items():
        if not isinstance(count, int) or count < 1 or count % stages:
            return name, f"must be 1 or more, and a multiple of the {stages} virtual stages"
    rest, middle = layers - sum(ends.values()) + len(counted), pp - len(ends)
    if ends and (rest < middle or (rest % (middle * stages) if middle else rest)):
        return next(iter(ends)), f"must leave layers that the other {middle} stages share evenly, {rest} are left"
    if not ends and rest % (pp * stages):
        means = f" ({rest} with those that count as one)" if counted else ""
        return None, f"with {stages} virtual stages must divide the {layers} layers of the model{means}"
    return None
