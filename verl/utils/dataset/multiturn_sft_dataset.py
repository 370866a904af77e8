"""Conversations for supervised training, with the loss on what the assistant says."""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.dataset.files import ColumnCheck, DataError, as_file_list, localize, read_parquet
from verl.utils.dataset.media import MediaEncoder, TurnEncoder, check_media
from verl.utils.dataset.rl_dataset import TRUNCATIONS, truncate
from verl.utils.dataset.rows import check_vision_rows
from verl.utils.dataset.vision_utils import MediaError

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
Turn = tuple[list[int], list[int]]


class SequenceTooLongError(DataError, NotImplementedError):
    """A row is longer than ``data.max_length`` and ``data.truncation`` is ``error``."""


def cut_sequence(values: list[int], max_length: int, truncation: str, where: str) -> list[int]:
    """Cut a row's tokens, or what goes along with them, to ``max_length``.

    Raises: SequenceTooLongError under ``error``.
    """
    if len(values) > max_length and truncation == "error":
        raise SequenceTooLongError(
            f"{where}: has {len(values)} tokens, data.max_length is {max_length}: raise it, or set data.truncation to "
            "left, right or middle"
        )
    return truncate(values, max_length, truncation)


class MultiTurnSFTDataset(Dataset):
    """Conversations from parquet files.

    An item holds ``input_ids, attention_mask, position_ids, loss_mask``, each (max_length,) and padded on the right,
    or, under ``pad_mode=no_padding``, the same without ``attention_mask`` and padding. ``loss_mask`` marks the tokens
    to be learnt: those of assistant messages after the generation prompt. A message's own ``loss_mask`` (0 or 1)
    replaces that of its role.

    With the ``processor`` of a vision-language model, messages may hold the images and videos of columns ``images`` and
    ``videos``, as prompts do; items then have ``position_ids`` (4, max_length) and ``multi_modal_inputs``.

    Raises: DataError naming file, row and column.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any] | None = None,
        processor: ProcessorMixin | None = None,
    ) -> None:
        self.config = config = config or {}
        self.media = None if processor is None else MediaEncoder(processor, config)
        self.templater: Any = processor if getattr(processor, "chat_template", None) else tokenizer
        columns = config.get("multiturn") or config
        self.messages_key = columns.get("messages_key", "messages")
        self.tools_key = columns.get("tools_key", "tools")
        self.enable_thinking_key = columns.get("enable_thinking_key", "enable_thinking")
        self.pad_mode = DatasetPadMode(config.get("pad_mode", "right"))
        if self.pad_mode is DatasetPadMode.LEFT_RIGHT:
            raise DataError("data.pad_mode must be right or no_padding, got 'left_right'")
        self.max_length = config.get("max_length", 1024)
        self.truncation = config.get("truncation", "error")
        if self.truncation not in TRUNCATIONS:
            raise DataError(f"data.truncation must be one of {TRUNCATIONS}, got {self.truncation!r}")
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs") or {})
        self.tokenizer = tokenizer
        self._warned = False
        self._read(localize(as_file_list(parquet_files), use_shm=config.get("use_shm", False)))

    def _read(self, paths: list[str]) -> None:
        self.data_files = paths
        self._tables = [read_parquet(path) for path in paths]
        self._ends = np.cumsum([table.num_rows for table in self._tables])
        for path, table in zip(paths, self._tables, strict=True):
            for check in ColumnCheck.over(path, table):
                values = check.column(self.messages_key, "data.messages_key")
                # a message may lack content: one that only calls tools does
                if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
                    check.messages(self.messages_key, "data.messages_key")
                check.refuse(self.messages_key, pa.compute.is_null(values), "is null", "data.messages_key")
                check_vision_rows(check, self.config, self.media is not None, self.messages_key)
                check_media(check, self.config)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _row(self, item: int) -> tuple[str, dict[str, Any]]:
        """Return where a row is, and its columns."""
        file = int(np.searchsorted(self._ends, item, side="right"))
        row = item - (int(self._ends[file - 1]) if file else 0)
        table = self._tables[file].slice(row, 1)
        columns = {name: table[name][0].as_py() for name in table.column_names}
        return f"{self.data_files[file]}, row {row}, column {self.messages_key!r}", columns

    def __getitem__(self, item: int) -> dict[str, Any]:
        where, row = self._row(range(len(self))[item])
        messages = [{k: v for k, v in message.items() if v is not None} for message in row[self.messages_key]]
        check_roles(messages, where)
        tools = row.get(self.tools_key)
        options = dict(self.apply_chat_template_kwargs)
        if row.get(self.enable_thinking_key) is not None:
            options["enable_thinking"] = bool(row[self.enable_thinking_key])
        try:
            encoder = TurnEncoder(self.tokenizer, self.media, row)
            messages = encoder.typed(messages)
            renderer = _Renderer(self.templater, json.loads(tools) if isinstance(tools, str) else tools, options)
            ids, mask = self._encode(renderer, encoder, messages, where)
            # a cut would part images from their tokens
            truncation = "error" if encoder.outputs else self.truncation
            ids = cut_sequence(ids, self.max_length, truncation, where)
            item = self._item(ids, cut_sequence(mask, self.max_length, truncation, where))
            return item | encoder.vision_columns(item["input_ids"], len(ids))
        except jinja2.TemplateError as error:
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        except MediaError as error:
            raise DataError(f"{where}: {error}") from error

    def _encode(self, renderer: "_Renderer", encoder: TurnEncoder, messages: list[dict[str, Any]], where: str) -> Turn:
        ids: list[int] = []
        mask: list[int] = []
        at = 0
        while at < len(messages):
            stop = at + 1
            if messages[at]["role"] == "tool":
                while stop < len(messages) and messages[stop]["role"] == "tool":
                    stop += 1
            text, learnt_from = renderer.turn(messages, at, stop, where)
            for part, learnt in ((text[:learnt_from], 0), (text[learnt_from:], 1)):
                tokens = encoder.encode(part, messages[at:stop] if not learnt else []) if part else []
                own = messages[at].get("loss_mask") if learnt or messages[at]["role"] != "assistant" else 0
                ids += tokens
                mask += [learnt if own is None else int(own)] * len(tokens)
            at = stop
        text = renderer.first(messages, len(messages))
        if not encoder.outputs and ids != self._ids(text) and not self._warned:
            self._warned = True
            logger.warning(
                "%s: the turns one by one are not the tokens of the whole conversation, since its chat template treats "
                "earlier turns in another way; the turns are used. Further rows are not reported",
                where,
            )
        return ids, mask

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _item(self, ids: list[int], mask: list[int]) -> dict[str, Tensor]:
        input_ids, loss_mask = torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
        positions = torch.arange(len(ids))
        if self.pad_mode is DatasetPadMode.NO_PADDING:
            return {"input_ids": input_ids, "position_ids": positions, "loss_mask": loss_mask}
        return pad_right(input_ids, loss_mask, self.max_length, int(self.tokenizer.pad_token_id))


def pad_right(input_ids: Tensor, loss_mask: Tensor, length: int, pad_token_id: int) -> dict[str, Tensor]:
    """Return ``input_ids, attention_mask, position_ids, loss_mask``, each (length,)."""
    size = len(input_ids)
    return {
        "input_ids": torch.nn.functional.pad(input_ids, (0, length - size), value=pad_token_id),
        "attention_mask": (torch.arange(length) < size).long(),
        "position_ids": torch.nn.functional.pad(torch.arange(size), (0, length - size)),
        "loss_mask": torch.nn.functional.pad(loss_mask, (0, length - size)),
    }


def check_roles(messages: list[dict[str, Any]], where: str) -> None:
    """Refuse a conversation that does not begin with an optional system message, a user and an assistant.

    Raises: DataError naming the row and the message.
    """
    roles = [message.get("role") for message in messages]
    for i, role in enumerate(roles):
        if role not in ROLES:
            raise DataError(f"{where}: message {i} has the role {role!r}, must be one of {ROLES}")
        if role == "system" and i > 0:
            raise DataError(f"{where}: message {i} is a system message, which may only be the first")
        own = messages[i].get("loss_mask")
        if own is not None and own not in (0, 1):
            raise DataError(f"{where}: message {i} has loss_mask={own!r}, must be 0 or 1")
    start = roles[1:3] if roles[:1] == ["system"] else roles[:2]
    if start != ["user", "assistant"]:
        raise DataError(
            f"{where}: must begin with user, assistant or system, user, assistant; it has the roles {roles}"
        )


class _Renderer:
    """Applies a chat template to parts of a conversation."""

    def __init__(self, templater: Any, tools: Any, options: dict[str, Any]) -> None:
        self.templater = templater
        self.options = {**options, "tools": tools, "tokenize": False}
        self._rendered: dict[tuple[int, bool], str] = {}

    def first(self, messages: list[dict[str, Any]], count: int, generation_prompt: bool = False) -> str:
        """Return the text of the first messages of the conversation that this renderer was made for."""
        key = (count, generation_prompt)
        if key not in self._rendered:
            self._rendered[key] = self.render(messages[:count], generation_prompt)
        return self._rendered[key]

    def render(self, messages: list[dict[str, Any]], generation_prompt: bool = False) -> str:
        """Return the text of some messages."""
        if not messages:
            return ""
        text = self.templater.apply_chat_template(messages, add_generation_prompt=generation_prompt, **self.options)
        assert isinstance(text, str)
        return text

    def turn(self, messages: list[dict[str, Any]], start: int, stop: int, where: str) -> tuple[str, int]:
        """Return the text that the messages from ``start`` to ``stop`` add, and where in it the learnt part begins."""
        role = messages[start]["role"]
        before = self._before(messages, start)
        upto = self._before(messages, stop)
        if upto.startswith(before):
            text = upto[len(before) :]
        else:  # the template changes earlier turns: take what a repetition of this one adds
            again = self.render(messages[:stop] + messages[start:stop])
            if not again.startswith(upto):
                raise DataError(f"{where}: the chat template does not tell the text of message {start} from others")
            text = again[len(upto) :]
        if role != "assistant":
            return text, len(text)
        prompted = self.first(messages, start, generation_prompt=True)
        prompt = prompted[len(before) :] if prompted.startswith(before) else ""
        return text, len(os.path.commonprefix([prompt, text]))

    def _before(self, messages: list[dict[str, Any]], start: int) -> str:
        if messages[:start] and all(message["role"] == "system" for message in messages[:start]):
            return self._system(messages[:start])
        return self.first(messages, start)

    def _system(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of a system message; a template may refuse it alone and put it into the first question."""
        try:
            return self.render(messages)
        except jinja2.TemplateError:
            return ""
