"""What every row of prompts must hold, checked without torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.utils.dataset.files import ColumnCheck, is_list

ROLLOUT = "actor_rollout_ref.rollout"


def check_prompt_rows(check: ColumnCheck, data: Mapping[str, Any], text_only: bool) -> None:
    """Refuse rows that no prompt can be made of, or that no reward can be computed for.

    Args: ``data`` is the node of the configuration.
    Raises: DataError naming file, row and column.
    """
    check.messages(data.get("prompt_key", "prompt"), "data.prompt_key", text_only=text_only)
    check.text(data.get("reward_fn_key", "data_source"), "data.reward_fn_key")
    _check_reward_model(check)


def check_vision_rows(check: ColumnCheck, data: Mapping[str, Any], has_processor: bool, prompt_key: str) -> None:
    """Refuse images and videos that the model or the prompt does not take; ``prompt_key`` is the column of messages.

    Raises: DataError naming file, row and column.
    """
    for kind, default in (("image", "images"), ("video", "videos")):
        key = f"{kind}_key"
        name = data.get(key, default)
        if name not in check.table.column_names:
            continue
        values = check.column(name)
        if not is_list(values.type) and not pa.types.is_null(values.type):
            check.fail(name, 0, f"must be a list, got {values.type}", f"data.{key}")
        counts = np.zeros(len(values), dtype=int)
        if is_list(values.type):
            counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy(False)
        if not has_processor:
            check.refuse(name, counts > 0, "holds images or videos, and the model has no processor", f"data.{key}")
            continue
        for limit, most in _limits(data, kind):
            if (counts > most).any():
                row = int(np.argmax(counts > most))
                problem = f"holds {counts[row]} {kind}s, {ROLLOUT}.{limit}={most} allows fewer: raise it"
                check.fail(name, row, problem, f"data.{key}")
        places = _count_places(check.column(prompt_key), kind)
        if (counts != places).any():
            row = int(np.argmax(counts != places))
            problem = (
                f"holds {counts[row]} {kind}s, and column {prompt_key!r} has {places[row]} places <{kind}> for them"
            )
            check.fail(name, row, problem, f"data.{key}")


def _limits(data: Mapping[str, Any], kind: str) -> Iterator[tuple[str, int]]:
    """Yield the keys of the rollout that bound the images or videos of a prompt, and the bounds."""
    if kind == "image" and data.get("limit_images") is not None:
        yield "limit_images", data["limit_images"]
    bound = (data.get("limit_mm_per_prompt") or {}).get(kind)
    if isinstance(bound, Mapping):  # vLLM's longer form, which also says how large they are
        bound = bound.get("count")
    if bound is not None:
        yield f"engine_kwargs.vllm.limit_mm_per_prompt.{kind}", bound


def _count_places(messages: pa.Array, kind: str) -> np.ndarray:
    """Return how often each row's messages name an image or a video, by a marker or by a typed part."""
    flat, parents = pc.list_flatten(messages), pc.list_parent_indices(messages).to_numpy(False)
    content = pc.struct_field(flat, "content")
    if is_list(content.type):
        found = [sum(part.get("type") == kind for part in parts or []) for parts in content.to_pylist()]
    else:
        found = pc.fill_null(pc.count_substring(content, f"<{kind}>"), 0).to_numpy(False)
    return np.bincount(parents, weights=found, minlength=len(messages)).astype(int)


def check_data_sources(check: ColumnCheck, reward_fn_key: str, problem_of: Callable[[str], str | None]) -> None:
    """Refuse rows whose data source cannot be scored, for the reason that ``problem_of`` gives.

    Raises: DataError naming file, row and column.
    """
    values = check.text(reward_fn_key, "data.reward_fn_key")
    for source in pc.unique(values).to_pylist():
        problem = problem_of(source)
        if problem is not None:
            check.refuse(reward_fn_key, pc.equal(values, source), problem, "data.reward_fn_key")


def _check_reward_model(check: ColumnCheck) -> None:
    wanted = 'must be a dict such as {"style": "rule", "ground_truth": "42"}'
    values = check.column("reward_model")
    if not pa.types.is_struct(values.type):
        check.fail("reward_model", 0, f"{wanted}, got {values.type}")
    check.refuse("reward_model", pc.is_null(values), f"is null, {wanted}")
    fields = [field.name for field in values.type]
    by_model = pa.array(np.zeros(len(values), dtype=bool))
    if "style" in fields:
        by_model = pc.fill_null(pc.equal(pc.cast(pc.struct_field(values, "style"), pa.string()), "model"), False)
    lacking = pa.array(np.ones(len(values), dtype=bool))
    if "ground_truth" in fields:
        lacking = pc.is_null(pc.struct_field(values, "ground_truth"))
    check.refuse(
        "reward_model.ground_truth",
        pc.and_not(lacking, by_model),
        "is missing: a rule scorer has nothing to judge by",
    )
