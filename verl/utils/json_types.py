"""Types of the contents of JSON and YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import WrongInput

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""A value of JSON or YAML. Its sequences and mappings are read only, so that ``list[int]`` is one too."""
JsonObject = dict[str, Json]
"""An object of JSON, a mapping of YAML: options, arguments of a call, a row."""
ConfigJson = Mapping[str, Any]
"""The content of a model's ``config.json``: the fields and their values depend on the model's family."""


def mapping_at(values: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    """Return the mapping under a name; empty if there is none.

    Raises: WrongInput if there is another value.
    """
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WrongInput(f"{name}={value!r}: must be a mapping")
    return value
