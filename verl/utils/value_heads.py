"""The value head (one number per token) in the files of a checkpoint, under the names that libraries use.

This imports no torch, so that a head that cannot be loaded is named before the start.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence

HEAD_NAME = "score"
"""The head of the models for token and sequence classification of transformers, which the engines read and write."""
OTHER_NAMES = ("v_head.summary", "v_head", "value_head.summary", "value_head", "reward_head", "classifier")
"""Names of the same linear layer in TRL, DeepSpeed-Chat and LLaMA-Factory, OpenRLHF, and others."""
HEAD_FILE = "value_head.safetensors"
"""The file in which LLaMA-Factory saves a head next to the model."""
_PICKLED_HEAD_FILE = "value_head.bin"

_ABOVE = r"(?:(?:model|module|base_model|pretrained_model)\.)*"
_WORDS = r"(?:\w+_)?(?:score|value|reward|critic|regress\w*|classif\w*|scalar|rank)s?(?:_\w+)?"
_LOOKS_LIKE_HEAD = re.compile(rf"{_ABOVE}(?:{_WORDS}|(?:v|q|rm|cls)_head)\.")


def stored_head(
    names: Collection[str], shape_of: Callable[[str], Sequence[int]] | None = None, folder: str = ""
) -> str | None:
    """Return the name under which a checkpoint with these tensors holds a value head; None if it holds none.

    Args: ``shape_of`` tells the shape of a tensor, if it is known; ``folder`` may hold a head in a file of its own.
    Raises: ValueError naming a tensor or file of a head that no engine reads.
    """
    if f"{HEAD_NAME}.weight" in names:
        return HEAD_NAME
    found = [name for name in OTHER_NAMES if f"{name}.weight" in names]
    if shape_of is not None:
        found = [name for name in found if _gives_a_number(shape_of(f"{name}.weight"))]
    read = {f"{found[0]}.weight", f"{found[0]}.bias"} if found else set()
    unread = sorted(name for name in set(names) - read if _is_of_head(name, shape_of))
    if unread:
        raise ValueError(
            f"it holds {unread[0]!r}, of a value head that is not read: a head is one linear layer with one output, "
            f"{HEAD_NAME}.weight or {', '.join(f'{name}.weight' for name in OTHER_NAMES)}. Rename its tensors, or "
            "remove them to start with a new head"
        )
    if not found and os.path.isfile(os.path.join(os.path.expanduser(folder), _PICKLED_HEAD_FILE)):
        raise ValueError(
            f"it holds {_PICKLED_HEAD_FILE}: save this head as {HEAD_FILE}, or remove it to start with a new head"
        )
    return found[0] if found else None


def _is_of_head(name: str, shape_of: Callable[[str], Sequence[int]] | None) -> bool:
    """Whether a tensor may belong to a value head: by its name, or as a matrix with one output outside the layers."""
    if _LOOKS_LIKE_HEAD.match(name):
        return True
    is_beside = name.endswith(".weight") and "embed" not in name and not re.search(r"\.\d+\.", name)
    return shape_of is not None and is_beside and _gives_a_number(shape_of(name))


def _gives_a_number(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[0] == 1
