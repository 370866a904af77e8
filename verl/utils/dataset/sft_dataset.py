"""Rows of supervised training: prompts with a response, pairs for reward models, and conversations."""

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.errors import ChatFormatError, DataError, RowTooLongError, WrongInput
from verl.utils.chat import ChatFormat, header_that_ends_turns, pieces
from verl.utils.chat.messages import plain
from verl.utils.chat_template import render_chat
from verl.utils.dataset import files
from verl.utils.dataset.config import DataConfig, Node
from verl.utils.dataset.files import ColumnCheck, Row
from verl.utils.dataset.rl_dataset import truncate
from verl.utils.dataset.vision_utils import (
    MediaEncoder,
    MediaError,
    TurnEncoder,
    check_media,
    kinds_of,
    templater_of,
)
from verl.utils.parsing import parse_json

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
Turn = tuple[list[int], list[int]]


# ---- tokens of a row, and batches


def cut_sequence(values: list[int], max_length: int, truncation: str, where: str) -> list[int]:
    """Truncate the tokens of a row, or their mask, to ``max_length``.

    Raises: RowTooLongError under ``error``.
    """
    if len(values) > max_length and truncation == "error":
        raise RowTooLongError(
            f"{where}: has {len(values)} tokens, data.max_length is {max_length}: raise it, or set data.truncation to "
            "left, right or middle"
        )
    return truncate(values, max_length, truncation)


def end_of_response(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] = {}) -> str:
    """Return the token that ends a response: ``eos_token``, or the header of the next turn where headers end turns."""
    header = header_that_ends_turns(ChatFormat(tokenizer, options=options)) if tokenizer.chat_template else None
    return str(tokenizer.eos_token) if header is None else header


def pad_right(input_ids: Tensor, loss_mask: Tensor, length: int, pad_token_id: int) -> dict[str, Tensor]:
    """Return ``input_ids, attention_mask, position_ids, loss_mask``, each (length,)."""
    size = len(input_ids)
    return {
        "input_ids": torch.nn.functional.pad(input_ids, (0, length - size), value=pad_token_id),
        "attention_mask": (torch.arange(length) < size).long(),
        "position_ids": torch.nn.functional.pad(torch.arange(size), (0, length - size)),
        "loss_mask": torch.nn.functional.pad(loss_mask, (0, length - size)),
    }


class DatasetPadMode(StrEnum):
    """The padding of rows."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    NO_PADDING = "no_padding"


LISTED = ("multi_modal_inputs",)
"""Keys that hold one object per row; a batch holds them as a list."""


class SFTTensorCollator:
    """Stack rows of equal length, or put rows of any length into jagged nested tensors."""

    def __init__(self, pad_mode: DatasetPadMode | str = DatasetPadMode.LEFT_RIGHT) -> None:
        try:
            self.pad_mode = DatasetPadMode(pad_mode)
        except ValueError:
            raise WrongInput(
                f"data.pad_mode must be one of {[mode.value for mode in DatasetPadMode]}, got {pad_mode!r}"
            ) from None

    def __call__(self, batch: list[Row]) -> Row:
        """Return one tensor per key; without padding, only 1-d tensors are joined and other values become lists."""
        if self.pad_mode is not DatasetPadMode.NO_PADDING:
            stacked = [{key: value for key, value in row.items() if key not in LISTED} for row in batch]
            return default_collate(stacked) | {key: [row[key] for row in batch] for key in LISTED if key in batch[0]}
        return {
            key: torch.nested.as_nested_tensor([row[key] for row in batch], layout=torch.jagged)
            if isinstance(value, torch.Tensor) and value.dim() == 1
            else [row[key] for row in batch]
            for key, value in batch[0].items()
        }


# ---- prompt and response


class SFTDataset(Dataset[Row]):
    """Single-turn rows: one text column for the prompt and one for the response.

    An item holds ``input_ids, attention_mask, position_ids, loss_mask``, each (max_length,), right-padded.
    ``loss_mask`` marks the positions that predict the response and its end (see ``end_of_response``): from the last
    prompt token to the second to last response token.

    With the ``processor`` of a vision-language model, prompts may show the images and videos of columns ``images`` and
    ``videos``; items then have ``position_ids`` (4, max_length) and ``multi_modal_inputs``.

    Raises: DataError naming file, row and column.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Node,
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        settings = DataConfig.of_data_set(config)
        self.tokenizer = tokenizer
        self.templater = templater_of(tokenizer, processor)
        self.media = None if processor is None else MediaEncoder(processor, settings)
        self.max_length = settings.max_length
        self.truncation = files.checked_truncation(settings)
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs)
        self._end = end_of_response(tokenizer, self.apply_chat_template_kwargs)
        self.data_files = files.localize(files.as_file_list(parquet_files), use_shm=settings.use_shm)
        self.prompts: list[str] = []
        self.responses: list[str] = []
        self._tables: list[pa.Table] = []
        tables = files.first_rows([files.read_parquet(path) for path in self.data_files], max_samples)
        self.rows_digest = files.rows_digest(tables)
        for path, table in zip(self.data_files, tables, strict=True):
            columns = [name for name in settings.media_columns().values() if name in table.column_names]
            self._tables.append(table.select(columns))
            for check in ColumnCheck.over(path, table):
                prompts, responses = files.check_text_pairs(check, settings)
                self.prompts += prompts
                self.responses += responses
                seen = _as_messages(check, settings.prompt_key, prompts, columns)
                files.check_vision_rows(seen, settings, kinds_of(processor), settings.prompt_key)
                check_media(seen, settings)
        self._ends = np.cumsum([table.num_rows for table in tables])

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, item: int) -> Row:
        file, place = files.place_of(range(len(self))[item], self._ends)
        where = f"{self.data_files[file]}, row {place}"
        columns = self._tables[file]
        row = files.written_rows(columns.slice(place, 1))[0] if columns.num_columns else {}
        try:
            encoder = TurnEncoder(self.tokenizer, self.media, row)
            messages = encoder.typed([{"role": "user", "content": self.prompts[item]}])
            options = {"add_generation_prompt": True, "tokenize": False, **self.apply_chat_template_kwargs}
            prompt_ids = encoder.encode(render_chat(self.templater, messages, options), messages)
            response = self.responses[item] + self._end
            response_ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
            # Truncation would separate images from their tokens.
            truncation = "error" if encoder.outputs else self.truncation
            mask = [0] * (len(prompt_ids) - 1) + [1] * len(response_ids) + [0]
            ids = cut_sequence(prompt_ids + response_ids, self.max_length, truncation, where)
            mask = cut_sequence(mask, self.max_length, truncation, where)
            mask[-1] = 0  # the last position has no next token to predict after truncation
            pad = int(self.tokenizer.pad_token_id)
            tensors = pad_right(torch.tensor(ids), torch.tensor(mask), self.max_length, pad)
            return tensors | encoder.vision_columns(tensors["input_ids"], len(ids))
        except MediaError as error:
            raise DataError(f"{where}: {error}") from error


def _as_messages(check: ColumnCheck, key: str, prompts: list[str], columns: list[str]) -> ColumnCheck:
    """Return the check of a table that holds prompts as messages, next to their images and videos."""
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    table = check.table.select(columns).append_column(key, pa.array(messages))
    return ColumnCheck(check.path, table, check.first_row, check.table.column_names)


# ---- pairs for reward models


class RMDataset(Dataset[Row]):
    """Rows of ``prompt``, ``chosen`` and ``rejected`` text.

    An item holds ``input_ids`` and ``attention_mask``, each (2, max_length), chosen response first, right-padded and
    truncated on the right.

    Raises: DataError naming file, row and column, also for a row with images or videos, which nothing here reads.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_length: int = 1024,
        add_eos: bool = True,
        cache_dir: str = "~/.cache/verl/rm",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.add_eos = add_eos
        self._end_id = tokenizer.convert_tokens_to_ids(end_of_response(tokenizer))
        self.rows: list[tuple[str, str, str]] = []
        for path in files.localize(files.as_file_list(parquet_files), cache_dir):
            for check in ColumnCheck.over(path, files.read_parquet(path)):
                files.refuse_media(check, DataConfig())
                columns = (check.texts(key, key) for key in (prompt_key, chosen_key, rejected_key))
                self.rows += zip(*columns, strict=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        prompt, *responses = self.rows[item]
        rows = [self._encode(prompt + response) for response in responses]
        return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")}

    def _encode(self, text: str) -> dict[str, Tensor]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.add_eos:
            ids = [*ids, self._end_id]
        kept = torch.tensor(ids[: self.max_length], dtype=torch.long)
        return pad_right(kept, torch.ones_like(kept), self.max_length, int(self.tokenizer.pad_token_id))


# ---- conversations


class MultiTurnSFTDataset(Dataset[Row]):
    """Conversations from parquet files.

    An item holds ``input_ids, attention_mask, position_ids, loss_mask``, each (max_length,) and right-padded. With
    ``pad_mode=no_padding`` it has neither padding nor ``attention_mask``. ``loss_mask`` is 1 for the tokens of
    assistant messages after their generation prompt and 0 elsewhere; a message's own ``loss_mask`` (0 or 1) overrides.

    Tokens are those of a rollout of the same conversation (``verl.utils.chat``): each assistant's turn as the chat
    template writes it when it is the last one, with its thought, and earlier turns stay as they are. Where the
    template ends a turn only with the next one, as that of GLM does, the last turn has the end that a rollout has.

    With the ``processor`` of a vision-language model, messages may show the images and videos of columns ``images`` and
    ``videos``, as prompts do; items then have ``position_ids`` (4, max_length) and ``multi_modal_inputs``.

    Raises: DataError naming file, row and column.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Node | None = None,
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        config = config or {}
        settings = DataConfig.of_data_set(config)
        columns = DataConfig.of_data_set(config.get("multiturn") or config)
        self.settings = settings
        self.media = None if processor is None else MediaEncoder(processor, settings)
        self._kinds = kinds_of(processor)
        self.chat = ChatFormat(tokenizer, processor)
        self.messages_key = columns.messages_key
        self.tools_key = columns.tools_key
        self.enable_thinking_key = columns.enable_thinking_key
        self.pad_mode = DatasetPadMode(settings.pad_mode)
        if self.pad_mode is DatasetPadMode.LEFT_RIGHT:
            raise DataError("data.pad_mode must be right or no_padding, got 'left_right'")
        self.max_length = settings.max_length
        self.truncation = files.checked_truncation(settings)
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs)
        self.tokenizer = tokenizer
        self._warned = settings.ignore_input_ids_mismatch is True
        self._warned_of_end = False
        self._read(files.localize(files.as_file_list(parquet_files), use_shm=settings.use_shm), max_samples)

    def _read(self, paths: list[str], max_samples: int = -1) -> None:
        self.data_files = paths
        self._tables = files.first_rows([files.read_parquet(path) for path in paths], max_samples)
        self._ends = np.cumsum([table.num_rows for table in self._tables])
        self.rows_digest = files.rows_digest(self._tables)
        for path, table in zip(paths, self._tables, strict=True):
            for check in ColumnCheck.over(path, table):
                files.check_conversations(check, self.messages_key)
                files.check_vision_rows(check, self.settings, self._kinds, self.messages_key)
                check_media(check, self.settings)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, item: int) -> Row:
        file, place = files.place_of(range(len(self))[item], self._ends)
        (row,) = files.written_rows(self._tables[file].slice(place, 1))
        where = f"{self.data_files[file]}, row {place}, column {self.messages_key!r}"
        messages = row[self.messages_key]
        check_roles(messages, where)
        tools = row.get(self.tools_key)
        options = dict(self.apply_chat_template_kwargs)
        if row.get(self.enable_thinking_key) is not None:
            options["enable_thinking"] = bool(row[self.enable_thinking_key])
        try:
            encoder = TurnEncoder(self.tokenizer, self.media, row)
            messages = encoder.typed(messages)
            chat = self.chat.with_options(options, self._tools(tools, where) or [])
            messages = [chat.control.of_others(each) if each["role"] == "tool" else each for each in messages]
            ids, mask = self._encode(chat, encoder, messages, where)
            # Truncation would separate images from their tokens.
            truncation = "error" if encoder.outputs else self.truncation
            ids = cut_sequence(ids, self.max_length, truncation, where)
            tensors = self._item(ids, cut_sequence(mask, self.max_length, truncation, where))
            return tensors | encoder.vision_columns(tensors["input_ids"], len(ids))
        except (ChatFormatError, MediaError) as error:
            raise DataError(f"{where}: {error}") from error

    def _tools(self, tools: str | list[Row] | None, where: str) -> list[Row] | None:
        """Return the descriptions of tools in a row, which may be JSON. Raises: DataError."""
        if not isinstance(tools, str):
            return tools
        try:
            described = parse_json(tools)
        except ValueError as error:
            raise DataError(f"{where}: its tools in column {self.tools_key!r} are no JSON: {error}") from error
        if not isinstance(described, list | None):
            raise DataError(f"{where}: its tools in column {self.tools_key!r} must be a list, got {tools[:80]!r}")
        return described

    def _encode(self, chat: ChatFormat, encoder: TurnEncoder, messages: list[Row], where: str) -> Turn:
        ids: list[int] = []
        mask: list[int] = []
        split = any(message.get("loss_mask") and message["role"] != "assistant" for message in messages)
        written = pieces(chat, messages, split)
        for piece in written:
            held = messages[piece.start : piece.stop]
            if not piece.said and any(isinstance(message.get("content"), list) for message in held):
                tokens = encoder.encode(piece.text, held)
            else:
                tokens = chat.encode_after(piece.before, piece.text)
            own = held[0].get("loss_mask") if held and (split or piece.said) else None
            ids += tokens
            mask += [int(piece.said if own is None else own)] * len(tokens)
        end = written[-1].added_end
        self._compare(chat, encoder, messages, ids, end, where)
        # A row that is cut anyway stays without an end that its template does not write.
        count = len(ids) - bool(end and len(ids) > self.max_length + 1)
        return ids[:count], mask[:count]

    def _compare(
        self, chat: ChatFormat, encoder: TurnEncoder, messages: list[Row], ids: list[int], end: str | None, where: str
    ) -> None:
        """Warn of the first row whose last turn has no end, and of the first that the template writes otherwise.

        Raises: DataError for the latter with ``data.ignore_input_ids_mismatch=false``.
        """
        if end is None and not self._warned_of_end:
            self._warned_of_end = True
            logger.warning(
                "%s: the chat template of %s ends an assistant's turn with no special token, so the last turn of a row "
                "trains no end, and the model may not learn to stop. Further rows are not reported",
                *(where, self.tokenizer.name_or_path or "the tokenizer"),
            )
        if encoder.outputs or self._warned:
            return
        if ids != chat.encode(chat.render(plain(messages)) + (end or "")):
            if self.settings.ignore_input_ids_mismatch is False:
                raise DataError(
                    f"{where}: the tokens of the single turns differ from those of the whole conversation, because the "
                    "chat template renders earlier turns differently: write data.ignore_input_ids_mismatch=true to "
                    "train on the single turns"
                )
            self._warned = True
            logger.warning(
                "%s: the tokens of the single turns differ from those of the whole conversation, because the chat "
                "template renders earlier turns differently; the single turns are used. Further rows are not reported",
                where,
            )

    def _item(self, ids: list[int], mask: list[int]) -> dict[str, Tensor]:
        input_ids = torch.tensor(ids, dtype=torch.long)
        loss_mask = torch.tensor(mask, dtype=torch.long)
        if self.pad_mode is DatasetPadMode.NO_PADDING:
            return {"input_ids": input_ids, "position_ids": torch.arange(len(ids)), "loss_mask": loss_mask}
        return pad_right(input_ids, loss_mask, self.max_length, int(self.tokenizer.pad_token_id))


def check_roles(messages: list[Row], where: str) -> None:
    """Reject a conversation that does not start with user and assistant, after an optional system message.

    Raises: DataError naming the row and the message.
    """
    roles = [message.get("role") for message in messages]
    for i, role in enumerate(roles):
        if role not in ROLES:
            raise DataError(f"{where}: message {i} has role {role!r}, must be one of {ROLES}")
        if role == "system" and i > 0:
            raise DataError(f"{where}: message {i} is a system message, which may only be the first")
        own = messages[i].get("loss_mask")
        if own is not None and own not in (0, 1):
            raise DataError(f"{where}: message {i} has loss_mask={own!r}, must be 0 or 1")
    start = roles[1:3] if roles[:1] == ["system"] else roles[:2]
    if start != ["user", "assistant"]:
        raise DataError(f"{where}: must start with the roles user, assistant or system, user, assistant; got {roles}")
