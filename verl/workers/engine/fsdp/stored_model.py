"""Read parts of a model's tensors from files with other names or another layout.

transformers knows what leads from the files to the model: renamings, and conversions of one or several tensors, such as
stacking the experts of a layer. This module runs transformers' own operations on the parts that a rank needs: no rank
reads for others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from verl.errors import ModelWeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightConverter

logger = logging.getLogger(__name__)


class WeightFiles(Protocol):
    """The tensors in the files of a checkpoint."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    def read(self, name: str, shape: Sequence[int], part: slice) -> Tensor:
        """Return the rows ``part`` of a tensor whose whole shape must be ``shape``."""


@dataclass
class Origin:
    """The source tensors of one conversion of transformers, or the name of a tensor that needs no conversion.

    Attributes:
        first: the tensor of the model after which transformers names the conversion; it may yield several.
        stored: the names in the files by the pattern that they match, in the order of transformers.
        shapes: those of the whole tensors that come out of a conversion, by their names in the model.
    """

    first: str
    converter: "WeightConverter | None"
    stored: dict[str, list[str]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The stored tensor, or the first of several."""
        return next(iter(self.stored.values()))[0]


class StoredModel:
    """The tensors of a model in the files of a checkpoint; the model itself may be on the meta device."""

    def __init__(self, model: "PreTrainedModel", files: WeightFiles) -> None:
        self._files = files
        self._config = model.config
        self._aliases = _tied_aliases(model)
        self._origins: dict[str, Origin] = {}
        for origin in _origins(model, files):
            if origin.converter is None:
                self._origins[origin.first] = origin
                continue
            whole = self._converted(origin, origin.stored, partial(_on_meta, files), model)
            origin.shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
            self._origins |= dict.fromkeys(whole, origin)
        mixed = [name for name, origin in self._origins.items() if origin.converter and not _keeps_rows(origin)]
        if mixed:
            logger.info(
                "each rank reads %d tensors as a whole, such as %r: transformers converts them by %s, which mixes rows",
                len(mixed), mixed[0], self._origins[mixed[0]].converter.operations,  # type: ignore[union-attr]
            )  # fmt: skip

    def read(self, name: str, shape: torch.Size, rows: slice) -> Tensor | None:
        """Return rows of a tensor of the model, whose whole shape is ``shape``; None if the files lack it.

        Raises: ModelWeightsError naming a tensor that does not fit.
        """
        known = next((each for each in (name, *self._aliases.get(name, ())) if each in self._origins), None)
        if known is None:
            return None
        origin = self._origins[known]
        if origin.converter is None:
            return self._files.read(origin.name, shape, rows)
        if origin.shapes[known] != tuple(shape):
            raise ModelWeightsError(
                f"tensor {name!r}, made of {origin.name!r} and others of its kind, has shape {origin.shapes[known]}, "
                f"the model of its config.json needs {tuple(shape)}"
            )
        first, last, _ = rows.indices(shape[0])
        if first == last:
            return torch.empty(0, *shape[1:])
        if _keeps_rows(origin):
            return self._read_rows(origin, torch.Size((last - first, *shape[1:])), slice(first, last))[known]
        return self._converted(origin, origin.stored, self._read_whole, _Expected(shape))[known][rows].clone()

    def _read_rows(self, origin: Origin, shape: torch.Size, rows: slice) -> dict[str, Tensor]:
        if _stacks(origin):
            stored = {pattern: names[rows] for pattern, names in origin.stored.items()}
            return self._converted(origin, stored, self._read_whole, _Expected(shape))
        return self._converted(origin, origin.stored, lambda name: self._read_whole(name, rows), _Expected(shape))

    def _read_whole(self, name: str, rows: slice = slice(None)) -> Tensor:
        return self._files.read(name, self._files.shape(name), rows)

    def _converted(
        self, origin: Origin, stored: Mapping[str, Sequence[str]], read: Callable[[str], Tensor], model: Any
    ) -> dict[str, Tensor]:
        """Let transformers convert tensors, which it reads one by one."""
        converter = deepcopy(origin.converter)
        assert converter is not None
        for pattern, names in stored.items():
            for name in names:
                converter.add_tensor(origin.first, name, pattern, partial(read, name))  # type: ignore[arg-type]
        try:
            found: dict[str, Any] = converter.convert(origin.first, model=model, config=self._config)
        except ModelWeightsError:
            raise
        except (RuntimeError, ValueError, IndexError, AttributeError, KeyError) as error:
            raise ModelWeightsError(
                f"transformers cannot make {origin.first!r} of {origin.name!r} and others of its kind: {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class _Expected(NamedTuple):
    """A placeholder with the shape that the model expects of a converted tensor."""

    shape: torch.Size

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty((), device="meta").expand(self.shape)


def _on_meta(files: WeightFiles, name: str) -> Tensor:
    return torch.empty(files.shape(name), device="meta")


def _origins(model: "PreTrainedModel", files: WeightFiles) -> list[Origin]:
    """Match the tensors of the files to those of the model, as ``from_pretrained`` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    wanted = model.state_dict()
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    found: dict[str, Origin] = {}
    for stored in sorted(files.names(), key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and stored in wanted:
            name, pattern = rename_source_key(stored, [], [], model.base_model_prefix, wanted)
        if name in wanted:
            origin = found.setdefault(name, Origin(name, None if pattern is None else by_pattern[pattern]))
            origin.stored.setdefault(pattern or stored, []).append(stored)
    return list(found.values())


def _stacks(origin: Origin) -> bool:
    """Whether each row of the result comes from another tensor of a list."""
    from transformers.core_model_loading import MergeModulelist

    assert origin.converter is not None
    first = origin.converter.operations[0]
    return type(first) is MergeModulelist and first.dim == 0


def _keeps_rows(origin: Origin) -> bool:
    """Whether row i of the result depends on row i of the stored tensors alone, or on tensor i of each list."""
    assert origin.converter is not None
    operations = origin.converter.operations
    return all(_keeps_rows_apart(each) for each in (operations[1:] if _stacks(origin) else operations))


def _keeps_rows_apart(operation: "ConversionOps") -> bool:
    from transformers.core_model_loading import Chunk, Concatenate, Transpose

    if type(operation) is Transpose:
        return bool(min(operation.dim0, operation.dim1) > 0)
    return type(operation) in (Concatenate, Chunk) and operation.dim > 0  # type: ignore[attr-defined]


def _tied_aliases(model: "PreTrainedModel") -> dict[str, list[str]]:
    """Return, for each unique parameter name, the other names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values() if rest}
