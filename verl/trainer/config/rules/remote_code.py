"""Rules for models with remote code: permission to run it, and the limits of their families."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.base_config import Violation
from verl.models.transformers.names import REMOTE_FAMILIES
from verl.trainer.config.run_config import RunConfig
from verl.utils.json_types import Json, mapping_at
from verl.workers.config.engines import ENGINES
from verl.workers.config.model import is_known_tokenizer, is_known_type
from verl.workers.config.rollout import NEED_FILES

KIMI = "kimi_vl"
MINICPMO = "minicpmo"
_MODEL = "actor_rollout_ref.model"
_READ_FIRST = "it runs with your rights, so read it, then write true"
_TOKENIZER_FILES = {
    "AutoTokenizer": ("tokenizer_config.json",),
    "AutoProcessor": ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"),
}


def trust_rules(hf_config: Mapping[str, Json], path: str, key: str, trusted: bool) -> Iterator[Violation]:
    """Yield a model that transformers lacks and whose remote code may not run; ``key`` holds the permission."""
    family = hf_config.get("model_type")
    if hf_config.get("auto_map") and not trusted and not is_known_type(family):
        expected = (
            f"transformers has no model_type={family!r}, so {path} needs the code in its own folder: {_READ_FIRST}"
        )
        yield Violation(key, False, expected)


def tokenizer_trust_rules(path: str, key: str, trusted: bool) -> Iterator[Violation]:
    """Yield a tokenizer or processor whose remote code may not run."""
    folder = Path(os.path.expanduser(path))
    if trusted:
        return
    for kind, names in _TOKENIZER_FILES.items():
        for settings in (_settings(folder / name) for name in names):
            own = mapping_at(settings, "auto_map").get(kind)
            is_known = kind == "AutoTokenizer" and is_known_tokenizer(settings.get("tokenizer_class"))
            if own and not is_known:
                what = kind.removeprefix("Auto").lower()
                expected = f"data sets need the {what} of {path}, whose code is in that folder: {_READ_FIRST}"
                yield Violation(key, False, expected)
                return


def _settings(file: Path) -> dict[str, Json]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # other rules name files that cannot be read
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("auto_map"), dict | None) else {}


def family_rules(run: RunConfig, hf_config: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield settings that the family of a policy with remote code does not support."""
    family = hf_config.get("model_type")
    if family not in REMOTE_FAMILIES:
        return
    shared = run.actor_rollout_ref
    yield from head_option_rules(hf_config, _MODEL, shared.model.use_fused_kernels, shared.model.use_liger)
    if shared.rollout.name in ENGINES.keys() - {"vllm"}:
        expected = f"does not run the remote code of model_type={family!r}: write vllm"
        yield Violation("actor_rollout_ref.rollout.name", shared.rollout.name, expected)
    if family == KIMI and shared.rollout.load_format != "dummy":
        expected = "must be dummy: Kimi-VL trains with topk_method=greedy, not as in its files, and so must the rollout"
        yield Violation("actor_rollout_ref.rollout.load_format", shared.rollout.load_format, expected)
    if family == KIMI and not shared.hybrid_engine:
        own = shared.rollout.engine_kwargs.get("vllm") or {}
        for name in sorted(own.keys() & NEED_FILES):
            expected = "makes servers read the files of Kimi-VL, whose router differs from training's: remove it"
            yield Violation(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}", own[name], expected)
    classes = "recipe/minicpmo/rl_dataset.py, and data.custom_cls.name=RLHFDataset"
    yield from data_class_rules(hf_config, run.data.custom_cls.path, classes)


def head_option_rules(hf_config: Mapping[str, Json], key: str, fused: bool, liger: bool) -> Iterator[Violation]:
    """Yield kernels that the families with remote code do not have; ``key`` is the node of the model."""
    family = hf_config.get("model_type")
    if family not in REMOTE_FAMILIES:
        return
    if fused:
        yield Violation(f"{key}.use_fused_kernels", True, f"model_type={family!r} has no fused head: write false")
    if liger:
        yield Violation(f"{key}.use_liger", True, f"liger-kernel has nothing for model_type={family!r}: write false")


def data_class_rules(hf_config: Mapping[str, Json], custom_class: Json, instead: str) -> Iterator[Violation]:
    """Yield a model whose processor output verl's data sets do not read; ``instead`` names a class that does."""
    if hf_config.get("model_type") == MINICPMO and not custom_class:
        expected = f"verl's own data sets do not read the output of MiniCPM-o's processor: write {instead}"
        yield Violation("data.custom_cls.path", custom_class, expected)


def value_model_rules(hf_config: Mapping[str, Json], key: str, path: str, instead: str) -> Iterator[Violation]:
    """Yield a family that has no value head."""
    family = hf_config.get("model_type")
    if family in REMOTE_FAMILIES:
        yield Violation(key, path, f"is of model_type {family!r}, which has no value head: {instead}")
