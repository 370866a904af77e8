"""A data set that asks a generator for new rows after each batch."""

import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.dataset.factory import has_state, load_class
from verl.utils.dataset.files import ColumnCheck
from verl.utils.dataset.rl_dataset import RLHFDataset

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class AbstractDataGenerator(ABC):
    """Makes new rows; ``data.datagen.path`` and ``name`` select it.

    A generator that remembers more than the rows of the data set has ``state_dict`` and ``load_state_dict``.
    """

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
    """Appends generated rows at construction and after each batch; checkpoints hold these rows."""

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any],
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.serialize_dataset = True  # generated rows are in no file
        node = config.get("datagen")
        cls = load_class(node, "data.datagen", AbstractDataGenerator, ("path", "name"))
        if cls is None:
            raise ValueError("data.datagen.path must name a file with a data generator, got null")
        self.data_generator = cls(node)
        self._of_files = self.dataframe
        self._generated: list[bytes] = []
        self.on_batch_end()
        if not has_state(self.data_generator) and vars(self.data_generator).keys() > {"config"}:
            name = type(self.data_generator).__name__
            logger.warning("data.datagen: %s has no state_dict and load_state_dict: a resume begins it again", name)

    def append_dataframe(self, new_dataframe: datasets.Dataset) -> None:
        """Check rows like rows of files, and append the rows that are not overlong."""
        self._append(new_dataframe)
        self._generated.append(_written(new_dataframe))

    def _append(self, rows: datasets.Dataset) -> None:
        self.check_rows(ColumnCheck("generated rows", rows.with_format("arrow")[:]))
        kept = self.maybe_filter_out_long_prompts(rows)
        self.dataframe = datasets.concatenate_datasets([self.dataframe, kept])

    def on_batch_end(self, batch: "DataProto | None" = None) -> None:
        """Ask the generator for rows."""
        self.append_dataframe(self.data_generator.generate(self))
        logger.info("the data set holds %d rows after generation", len(self))

    def state_dict(self) -> dict[str, Any]:
        """Return the generated rows and the generator's state."""
        if get_worker_info() is not None:
            return {}
        state: dict[str, Any] = {"rows": list(self._generated)}
        if has_state(self.data_generator):
            state["generator"] = self.data_generator.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the generated rows by those of a checkpoint."""
        if not state:
            return
        self.dataframe = self._of_files
        self._generated = list(state["rows"])
        for written in self._generated:
            self._append(datasets.Dataset(pq.read_table(io.BytesIO(written))))
        if "generator" in state and has_state(self.data_generator):
            self.data_generator.load_state_dict(state["generator"])


def _written(rows: datasets.Dataset) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(rows.with_format("arrow")[:], buffer)
    return bytes(buffer.getvalue().to_pybytes())
