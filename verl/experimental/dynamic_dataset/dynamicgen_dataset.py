"""A data set that asks a generator for new rows after each batch."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import datasets
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.dataset.factory import load_class
from verl.utils.dataset.files import ColumnCheck
from verl.utils.dataset.rl_dataset import RLHFDataset

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class AbstractDataGenerator(ABC):
    """Makes new rows; ``data.datagen.path`` and ``name`` select it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the ``data.datagen`` node."""
        self.config = config

    @abstractmethod
    def generate(self, dataset: "DynamicGenDataset") -> datasets.Dataset:
        """Return new rows with the columns of ``dataset``."""


class MockDataGenerator(AbstractDataGenerator):
    """Repeats the first row."""

    def generate(self, dataset: "DynamicGenDataset") -> datasets.Dataset:
        """Return the first row."""
        return dataset.dataframe.select([0])


class DynamicGenDataset(RLHFDataset):
    """Appends generated rows at construction and after each batch."""

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any],
        processor: ProcessorMixin | None = None,
    ) -> None:
        super().__init__(data_files, tokenizer, config, processor)
        self.serialize_dataset = True  # generated rows are in no file
        node = config.get("datagen")
        cls = load_class(node, "data.datagen", AbstractDataGenerator, ("path", "name"))
        if cls is None:
            raise ValueError("data.datagen.path must name a file with a data generator, got null")
        self.data_generator = cls(node)
        self.on_batch_end()

    def append_dataframe(self, new_dataframe: datasets.Dataset) -> None:
        """Append those of the rows that are not overlong, after the checks that rows of files get."""
        self.check_rows(ColumnCheck("generated rows", new_dataframe.with_format("arrow")[:]))
        kept = self.maybe_filter_out_long_prompts(new_dataframe)
        self.dataframe = datasets.concatenate_datasets([self.dataframe, kept])

    def on_batch_end(self, batch: "DataProto | None" = None) -> None:
        """Ask the generator for rows."""
        self.append_dataframe(self.data_generator.generate(self))
        logger.info("the data set holds %d rows after generation", len(self))
