"""Base classes of custom samplers, which ``data.sampler.class_path`` and ``class_name`` select."""

from abc import abstractmethod
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

if TYPE_CHECKING:
    from verl.protocol import DataProto


class AbstractSampler(Sampler[int]):
    """Yields row numbers of ``data_source``."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None:
        """Take the data set and the ``data`` node."""


class AbstractCurriculumSampler(AbstractSampler):
    """Learns from each step what to yield next."""

    @abstractmethod
    def update(self, batch: "DataProto") -> None:
        """Take the batch of the step that has ended, with its scores."""
