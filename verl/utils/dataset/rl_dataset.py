"""Prompts for reinforcement learning, read from parquet files."""

import copy
import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import datasets
import jinja2
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.errors import DataError, PromptTooLongError, WrongSetting
from verl.utils.chat import CUT, ControlTexts, text_tokens
from verl.utils.chat.others import media_parts
from verl.utils.chat_template import ChatTemplateTimeout, render_chat, shared_time_limit
from verl.utils.dataset import files
from verl.utils.dataset.config import DataConfig, Node
from verl.utils.dataset.files import ColumnCheck, Row
from verl.utils.dataset.token_bounds import count_tokens, most_tokens
from verl.utils.dataset.vision_utils import (
    Media,
    MediaEncoder,
    MediaError,
    check_media,
    kinds_of,
    model_inputs,
    templater_of,
)
from verl.utils.py_functional import object_array
from verl.utils.vision.positions import position_ids

logger = logging.getLogger(__name__)

FILTER_BATCH_ROWS = 1000
LOOP_COLUMN = "agent_name"
UNREADABLE = -1  # stands for the length of a row whose images or videos cannot be read


def collate_fn(data_list: list[Row]) -> Row:
    """Stack the tensors of the rows; everything else becomes a 1-d array of objects.

    Raises: DataError when the rows have different keys.
    """
    columns = defaultdict(list)
    for row in data_list:
        for key, value in row.items():
            columns[key].append(value)
    for key, values in columns.items():
        if len(values) != len(data_list):
            raise DataError(f"column {key!r} is in {len(values)} of the {len(data_list)} rows of a batch")
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)
        for key, values in columns.items()
    }


def truncate(ids: list[int], max_length: int, truncation: str) -> list[int]:
    """Truncate to ``max_length``: keep the tail (left), the head (right), or half of each (middle).

    Raises: PromptTooLongError under ``error``.
    """
    if len(ids) <= max_length:
        return ids
    if truncation == "error":
        raise PromptTooLongError(f"{len(ids)} tokens are more than {max_length}")
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return ids[:head] + ids[len(ids) - (max_length - head) :]


class RLHFDataset(Dataset[Row]):
    """Chat prompts, tokenized and left-padded, with the images and videos that a vision-language model takes.

    With a processor, an item also holds ``multi_modal_data`` for the rollout engine and ``multi_modal_inputs``, the
    processor's tensors for training; both are empty in text-only rows.

    Args:
        data_files: one or several parquet files, local or on HDFS.
        tokenizer: owns the chat template.
        config: the ``data`` node.
        processor: the processor of a vision-language model.
        max_samples: how many of the first rows are used; -1: all.

    Attributes: ``rows_digest`` tells the rows of the files, and their order, from others; checkpoints hold it.

    Raises: DataError (a ValueError) naming file, row and column of unusable data.
    """

    rows_digest: str | None = None

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Node,
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        self.max_samples = max_samples
        settings = DataConfig.of_data_set(config)
        self.original_data_files = files.as_file_list(data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config
        self.settings = settings
        self.media = None if processor is None else MediaEncoder(processor, settings)

        # Data sets that derive from this one read these attributes.
        assert settings.cache_dir is not None, "of_data_set has a default"
        self.cache_dir = os.path.expanduser(settings.cache_dir)
        self.use_shm = settings.use_shm
        self.prompt_key = settings.prompt_key
        self.image_key = settings.image_key
        self.video_key = settings.video_key
        self.reward_fn_key = settings.reward_fn_key
        self.max_prompt_length = settings.max_prompt_length
        self.return_raw_chat = settings.return_raw_chat
        self.return_full_prompt = settings.return_full_prompt
        self.return_multi_modal_inputs = settings.return_multi_modal_inputs
        self.truncation = files.checked_truncation(settings)
        self.filter_overlong_prompts = settings.filter_overlong_prompts
        self.num_workers = min(settings.filter_overlong_prompts_workers, os.cpu_count() or 1)
        self.need_tools_kwargs = settings.need_tools_kwargs
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs)
        tools = json.loads((settings.prompt_tools or {}).get("schemas") or "[]")
        self._tools = ControlTexts(tokenizer).described(tools) if tools else []
        self._templater = templater_of(tokenizer, processor)
        self.serialize_dataset = False
        if self.max_prompt_length < 1:
            raise DataError(f"data.max_prompt_length must be at least 1, got {self.max_prompt_length}")
        if self._templater.chat_template is None and "chat_template" not in self.apply_chat_template_kwargs:
            raise WrongSetting(
                f"the tokenizer of {self.tokenizer.name_or_path!r} has no chat template: set "
                "actor_rollout_ref.model.custom_chat_template, or data.apply_chat_template_kwargs.chat_template"
            )
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        self.data_files = files.localize(self.original_data_files, self.cache_dir, self.use_shm)
        tables = files.first_rows([self.read_table(path) for path in self.data_files], self.max_samples)
        tables = files.with_columns(tables, self.settings.media_columns().values())
        for path, table in zip(self.data_files, tables, strict=True):
            files.refuse_maps(path, table.schema)
            for check in ColumnCheck.over(path, table):
                self.check_rows(check)
        self._file_ends = np.cumsum([table.num_rows for table in tables])
        self._rows: np.ndarray | None = None  # rows of the files that the filter kept; None for all
        self.__dict__.pop("_dataframe", None)
        table = files.concat_tables(self.data_files, tables)
        self.dataframe = self.maybe_filter_out_long_prompts(datasets.Dataset(table))
        self.rows_digest = files.rows_digest([table], self._rows)
        if len(self.dataframe) == 0:
            raise DataError(
                f"{', '.join(self.data_files)}: all {self._file_ends[-1]} prompts are longer than "
                f"data.max_prompt_length={self.max_prompt_length}: raise it"
            )

    @property
    def dataframe(self) -> datasets.Dataset:
        """The rows as their author wrote them: dicts come out without the null fields that Arrow adds."""
        return self._dataframe

    @dataframe.setter
    def dataframe(self, rows: datasets.Dataset) -> None:
        self._dataframe = rows.with_transform(_WrittenColumns(rows.features.arrow_schema))

    @property
    def _has_rows(self) -> bool:
        return "_dataframe" in self.__dict__

    def read_table(self, path: str) -> pa.Table:
        """Return the rows of a file; override this method to read other formats."""
        return files.read_parquet(path)

    def check_rows(self, check: ColumnCheck) -> None:
        """Reject rows without a usable prompt or without the fields that scoring needs."""
        options = self.apply_chat_template_kwargs
        files.check_prompt_rows(check, self.prompt_key, self.reward_fn_key, self.processor is None, options)
        files.check_vision_rows(check, self.settings, kinds_of(self.processor), self.prompt_key)
        check_media(check, self.settings)

    def maybe_filter_out_long_prompts(self, dataframe: datasets.Dataset) -> datasets.Dataset:
        """Drop prompts longer than ``max_prompt_length`` if ``filter_overlong_prompts`` is set."""
        if not self.filter_overlong_prompts:
            return dataframe
        limit = self.max_prompt_length
        fits = self.prompt_lengths(dataframe, enough=limit) <= limit
        if fits.all():
            return dataframe
        kept = np.flatnonzero(fits)
        if not self._has_rows:  # the first call filters the files, later calls filter generated rows
            self._rows = kept
        share = f"{len(fits) - len(kept)} of {len(fits)}"
        logger.warning("dropped %s prompts, which are longer than data.max_prompt_length=%d", share, limit)
        return dataframe.select(kept)

    def prompt_lengths(self, dataframe: datasets.Dataset, enough: int | None = None) -> np.ndarray:
        """Count the tokens of every templated prompt, including those of images, videos and tools that loops show.

        ``filter_overlong_prompts_workers`` processes share the work. With ``enough``, a text that cannot have more
        tokens than that is not tokenized; its length is an upper bound, which is at most ``enough``.
        """
        workers = min(self.num_workers, 1 + len(dataframe) // FILTER_BATCH_ROWS)
        read = (self.prompt_key, *self.settings.media_columns().values(), LOOP_COLUMN)
        keys = [key for key in read if key in dataframe.column_names]
        lengths = dataframe.select_columns(keys).map(
            _count_tokens,
            batched=True,
            batch_size=FILTER_BATCH_ROWS,
            num_proc=workers if workers > 1 else None,
            remove_columns=keys,
            fn_kwargs={"dataset": self._without_data(), "enough": enough},
            new_fingerprint="prompt_lengths",
            desc="Filtering overlong prompts",
        )
        found = lengths.with_format("numpy")["length"][:]
        # The processes that count mark an unreadable row; reading it again gives the error.
        for item in map(int, np.flatnonzero(found == UNREADABLE)):
            try:
                _count_media_tokens(self, dataframe[item])
            except MediaError as error:
                where = f"generated row {item}" if self._has_rows else self.where(item)
                raise DataError(f"{where}, {error}") from error
        return found

    def _without_data(self) -> "RLHFDataset":
        """Return a copy without rows, cheap to send to the processes that count."""
        light = copy.copy(self)
        for name in ("_dataframe", "_file_ends"):
            light.__dict__.pop(name, None)
        return light

    def __len__(self) -> int:
        return len(self.dataframe)

    def _build_messages(self, example: Row) -> list[Row]:
        """Take the messages out of a row."""
        messages: list[Row] = example.pop(self.prompt_key)
        return messages if self.media is None else self.media.typed(messages, example)

    def render(self, messages: list[Row], tools: Sequence[Row] = ()) -> str:
        """Apply the chat template, with the generation prompt at the end."""
        options = {"add_generation_prompt": True, "tokenize": False, **self.apply_chat_template_kwargs}
        return render_chat(self._templater, messages, {**options, "tools": list(tools)} if tools else options)

    def tools_of(self, row: Row) -> list[Row]:
        """Return the tools that the agent loop of a row shows with its prompt; ``data.prompt_tools`` says which."""
        settings = self.settings.prompt_tools or {}
        loop = row.get(LOOP_COLUMN) or settings.get("default_loop")
        return [] if loop in settings.get("loops_without", ()) else self._tools

    def where(self, item: int) -> str:
        """Name the file and row of an item."""
        from_files = int(self._file_ends[-1]) if self._rows is None else len(self._rows)
        if item >= from_files:
            return f"generated row {item - from_files}"
        file, row = files.place_of(item if self._rows is None else int(self._rows[item]), self._file_ends)
        return f"{self.data_files[file]}, row {row}"

    def __getitem__(self, item: int) -> Row:
        item = range(len(self))[item]
        row: Row = self.dataframe[item]
        messages = self._build_messages(row)
        try:
            text = self.render(messages)
            row |= self._tensors(item, text, self.take_media(row))
        except jinja2.TemplateError as error:
            raise DataError(
                f"{self.where(item)}, column {self.prompt_key!r}: the chat template rejects it: {error}"
            ) from error
        except MediaError as error:
            raise DataError(f"{self.where(item)}, {error}") from error
        if self.return_raw_chat:
            row["raw_prompt"] = messages
        if self.return_full_prompt:
            row["full_prompts"] = text
        return self._with_extra_info(item, row)

    def take_media(self, row: Row) -> Media:
        """Take the images and videos out of a row.

        Raises: MediaError when one cannot be read.
        """
        if self.media is not None:
            return self.media.take(row)
        for key in self.settings.media_columns().values():
            row.pop(key, None)
        return Media()

    def _tensors(self, item: int, text: str, media: Media) -> Row:
        """Return the padded prompt; ``raw_prompt_ids`` hold one placeholder token per image, ``input_ids`` all."""
        raw_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        encoded = self.media.encode(text, media) if self.media is not None and media else {}
        ids = encoded["input_ids"][0].tolist() if encoded else raw_ids
        length = self.max_prompt_length
        # Truncation would separate images from their tokens.
        if len(ids) > length and (encoded or self.truncation == "error"):
            instead = "" if encoded else "data.truncation to left, right or middle, or "
            raise PromptTooLongError(
                f"{self.where(item)}, column {self.prompt_key!r}: the prompt has {len(ids)} tokens, "
                f"data.max_prompt_length is {length}: raise it, or set {instead}data.filter_overlong_prompts=True"
            )
        if not encoded:
            ids = raw_ids = truncate(raw_ids, length, self.truncation)
        pad = length - len(ids)
        padded = [self.tokenizer.pad_token_id] * pad + ids
        input_ids = torch.tensor(padded, dtype=torch.long)
        attention_mask = (torch.arange(length) >= pad).long()
        tensors: Row = {"input_ids": input_ids, "attention_mask": attention_mask, "raw_prompt_ids": raw_ids}
        if self.media is None:
            return tensors | {"position_ids": position_ids(None, input_ids, attention_mask)}
        tensors["position_ids"] = self.media.position_ids(input_ids, attention_mask, encoded)
        tensors["multi_modal_data"] = media.as_data()
        if self.return_multi_modal_inputs:
            tensors["multi_modal_inputs"] = model_inputs(encoded)
        return tensors

    def _with_extra_info(self, item: int, row: Row) -> Row:
        extra = row.get("extra_info") or {}
        row |= {
            "extra_info": extra,
            "index": 0 if extra.get("index") is None else extra["index"],
            "tools_kwargs": extra.get("tools_kwargs") or {},
            "interaction_kwargs": extra.get("interaction_kwargs") or {},
        }
        needed = extra.get("need_tools_kwargs")
        if (self.need_tools_kwargs if needed is None else needed) and not row["tools_kwargs"]:
            logger.warning("%s: need_tools_kwargs is set, but extra_info.tools_kwargs is empty", self.where(item))
        return row

    def resume_dataset_state(self) -> None:
        """Read the original files again after unpickling."""
        self._read_files_and_tokenize()

    def __getstate__(self) -> Row:
        state = self.__dict__.copy()
        if not self.serialize_dataset:
            state.pop("_dataframe", None)
        return state

    def __setstate__(self, state: Row) -> None:
        self.__dict__.update(state)
        if not self._has_rows and "_file_ends" in state:
            tables = [self.read_table(path) for path in self.data_files]
            self.dataframe = datasets.Dataset(files.concat_tables(self.data_files, tables))
            if self._rows is not None:
                self.dataframe = self.dataframe.select(self._rows)


@dataclass(frozen=True)
class _WrittenColumns:
    """The conversion of table rows to Python rows, which is sent to the processes that count tokens."""

    schema: pa.Schema

    def __call__(self, columns: Row) -> Row:
        kinds = {name: self.schema.field(name).type for name in columns}
        return {name: [files.as_written(each, kinds[name]) for each in values] for name, values in columns.items()}


def _count_tokens(batch: Row, dataset: RLHFDataset, enough: int | None = None) -> dict[str, list[int]]:
    lengths: dict[int, int] = {}
    try:
        with shared_time_limit() if dataset.media is None else nullcontext():
            texts = _texts_to_count(batch, dataset, lengths, enough)
    except ChatTemplateTimeout:
        lengths.clear()
        texts = _texts_to_count(batch, dataset, lengths, enough)
    counted = dict(zip(texts, count_tokens(dataset.tokenizer, list(texts.values())), strict=True))
    return {"length": [lengths[i] if i in lengths else counted[i] for i in range(len(batch[dataset.prompt_key]))]}


def _texts_to_count(
    batch: Row, dataset: RLHFDataset, lengths: dict[int, int], enough: int | None = None
) -> dict[int, str]:
    """Return the texts to tokenize, by row; write the lengths of the other rows."""
    bound = None if enough is None else most_tokens(dataset.tokenizer)
    texts: dict[int, str] = {}
    for index in range(len(batch[dataset.prompt_key])):
        row = {key: values[index] for key, values in batch.items()}
        try:
            text, count = _count_media_tokens(dataset, row)
        except ChatTemplateTimeout:
            raise  # the next row would take as long
        except jinja2.TemplateError:
            text, count = "", 0  # __getitem__ names the row
        except MediaError:
            text = ""
            count = UNREADABLE
        if not count and enough is not None and bound is not None and (most := bound(text)) <= enough:
            count = most
        if count:
            lengths[index] = count
        else:
            texts[index] = text
    return texts


def _count_media_tokens(dataset: RLHFDataset, row: Row) -> tuple[str, int]:
    """Return the text of a row, and its number of tokens if it has images or videos, else 0."""
    text = dataset.render(dataset._build_messages(row), dataset.tools_of(row))
    media = dataset.take_media(row)
    if media and dataset.media:
        parts = media_parts(text, dataset.media.processor, media.images, media.videos)
        encoded = (dataset.media.encode(part, Media(images, videos)) for part, images, videos in parts)
        return text, sum(len(each["input_ids"][0]) for each in encoded)
    return text, len(text_tokens(dataset.tokenizer, text)) if CUT in text else 0
