"""Models that Megatron-Core cannot hold, told from their ``config.json``."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf

from verl.base_config import Violation
from verl.models.mcore_limits import LIMITS, Limit, causal_name, model_limits
from verl.trainer.config.refusals import select
from verl.utils import envs
from verl.workers.config.model import ROPE_KEYS, ConfigFields, apply_overrides, path_problems, read_config_json

Tree = Mapping[str, Any]

ARCHITECTURES = tuple(sorted(LIMITS))
"""Those of ``verl.models.mcore``, which the launching process does not import: it would import torch."""


def config_fields(node: Tree) -> ConfigFields | None:
    """Return what ``config.json`` and ``override_config`` of a model node say; None where the path is wrong.

    Of a model that is not here yet, a hub id, only the latter is known.
    """
    path = node.get("hf_config_path") or node.get("path")
    if not isinstance(path, str) or list(path_problems(path)):
        return None
    fields = ConfigFields(read_config_json(path))
    apply_overrides(fields, node.get("override_config") or {})
    return fields


def reference_node(shared: Tree) -> tuple[str, Tree]:
    """Return the model node of the reference and its key; ``shared`` is the node ``actor_rollout_ref``."""
    own = shared["ref"].get("model")
    if not isinstance(own, Mapping) or not own.get("path"):
        return "actor_rollout_ref.model", shared["model"]
    merged: Any = OmegaConf.to_container(OmegaConf.merge(dict(shared["model"]), dict(own)))
    return "actor_rollout_ref.ref.model", merged


def family_rules(
    node: Tree, fields: ConfigFields | None, key: str, on_fsdp: str, path_key: str | None = None
) -> Iterator[Violation]:
    """Yield an architecture that no family here has, and what its family would compute differently.

    Modules of the user's may enter families, and code beside a model may read ``config.json`` otherwise: the workers
    judge these.

    Args: ``key`` is that of ``node``, ``path_key`` that of its path where it is not below, ``on_fsdp`` what to write
        for a run on FSDP.
    """
    if fields is None or envs.read("VERL_USE_EXTERNAL_MODULES") or node.get("external_lib"):
        return
    at = (path_key or f"{key}.path", node.get("path"))
    if node.get("hf_config_path"):
        at = (f"{key}.hf_config_path", node["hf_config_path"])
    named = getattr(fields, "architectures", None) or []
    if named and [causal_name(name) in ARCHITECTURES for name in named] != [True]:
        expected = f"architecture {', '.join(named)} is not supported with strategy=megatron: it knows "
        yield Violation.unsupported(*at, f"{expected}{', '.join(ARCHITECTURES)}; write {on_fsdp}")
    elif named and not (node.get("trust_remote_code") and getattr(fields, "auto_map", None)):
        yield from _limit_rules(node, list(_limits(named[0], fields)), key, at, on_fsdp)


def _limits(architecture: str, fields: ConfigFields) -> Iterator[Limit]:
    with suppress(TypeError):  # of a field that is no number: transformers says which
        yield from model_limits(architecture, fields)


def _limit_rules(node: Tree, limits: list[Limit], key: str, at: tuple[str, Any], on_fsdp: str) -> Iterator[Violation]:
    """Yield the limits under the overrides that they come from, and the rest in one under the path."""
    overrides, of_file = node.get("override_config") or {}, []
    for limit in limits:
        name = _override_of(limit, overrides)
        if name is None:
            of_file.append(str(limit))
        else:
            expected = f"{limit.fault}; leave it out, or write {on_fsdp}"
            yield Violation(f"{key}.override_config.{name}", select(overrides, name), expected)
    if of_file:
        yield Violation(*at, f"{'; '.join(of_file)}; name another model, or write {on_fsdp}")


def _override_of(limit: Limit, overrides: Tree) -> str | None:
    """Return the key among ``overrides`` that a limit comes from; None where it comes from the file."""
    for name in ROPE_KEYS if limit.field == "rope_scaling" else (limit.field,):
        for key, place in ((f"model_config.{name}", overrides.get("model_config") or {}), (name, overrides)):
            if name in place:
                return key
    return None
