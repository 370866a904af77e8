"""Render the policy's prompts and responses by the chat template of a reward model, and tokenize them again."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.base_config import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.utils.chat_template import render_chat
from verl.utils.torch_functional import SequenceTooLongError

Message = dict[str, Any]
"""A message of a chat: ``role`` and ``content``, a text or a list of typed parts."""


class MissingRawPromptError(ValueError, KeyError):
    """The batch holds no messages to render the chat from."""


class RawPromptTypeError(ValueError, TypeError):
    """A row of ``raw_prompt`` is not a list of messages."""


@dataclass
class ChatRenderer:
    """Render each conversation by the chat template of ``target`` and tokenize it again.

    Args:
        source: tokenizer of the policy, which decodes its responses.
        target: tokenizer of the reward model.
        max_length: the most tokens of a row; None means the width of the batch.
        truncation: the part of a longer row to cut: ``right``, ``left`` or ``middle``; ``error`` raises instead.
        ends: tokens that end a response of the policy.
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    max_length: int | None
    truncation: str
    ends: Collection[int]

    def __call__(self, data: DataProto) -> tuple[dict[str, Tensor], int]:
        """Return ``input_ids``, ``attention_mask``, ``position_ids`` (B, L), right-padded, and the number of cut rows.

        Raises: MissingRawPromptError without ``raw_prompt``, RawPromptTypeError for a row of another type, ValueError
            if the template rejects a chat, SequenceTooLongError for ``truncation=error``; each names the row.
        """
        chats = [
            [*prompt, {"role": "assistant", "content": text}]
            for prompt, text in zip(raw_prompts(data), response_texts(data, self.source, self.ends), strict=True)
        ]
        rows: list[list[int]] = self.target(self._render(chats), add_special_tokens=False)["input_ids"]
        limit = self.max_length or tensors_of(data)["attention_mask"].shape[-1]
        cut = [self._cut(index, row, limit) for index, row in enumerate(rows)]
        pad: Any = self.target.pad_token_id
        return right_padded(cut, pad), sum(len(row) > limit for row in rows)

    def _render(self, chats: list[list[Message]]) -> list[str]:
        texts: list[str] = []
        for index, chat in enumerate(chats):
            try:
                text = render_chat(self.target, chat, {"add_generation_prompt": False, "tokenize": False})
            except (jinja2.TemplateError, ValueError) as error:  # ValueError: the tokenizer has no template
                raise WrongInput(
                    f"row {index} of the batch, roles {[message.get('role') for message in chat]}: the chat template "
                    f"of reward_model.model.path rejects it: {error}"
                ) from error
            texts.append(text)
        return texts

    def _cut(self, index: int, row: list[int], limit: int) -> list[int]:
        if len(row) <= limit:
            return row
        if self.truncation == "error":
            raise SequenceTooLongError(
                f"row {index} of the batch has {len(row)} tokens in the reward model's chat template, "
                f"reward_model.max_length is {limit}: raise it, or set reward_model.truncation to right, left or middle"
            )
        head = {"left": 0, "right": limit, "middle": limit // 2}[self.truncation]
        return row[:head] + row[len(row) - (limit - head) :]


def response_texts(data: DataProto, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> list[str]:
    """Decode the responses without the end-of-sequence tokens at their ends."""
    batch = tensors_of(data)
    responses = batch["responses"].cpu()
    mask = batch["attention_mask"][:, -responses.shape[1] :].bool().cpu()
    rows = [ids[kept].tolist() for ids, kept in zip(responses, mask, strict=True)]
    for row in rows:
        while row and row[-1] in ends:
            row.pop()
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False)
    eos = tokenizer.eos_token
    return [text.replace(eos, "") for text in texts] if isinstance(eos, str) else texts


def right_padded(rows: Sequence[list[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Return rows of tokens as ``input_ids``, ``attention_mask`` and ``position_ids``, as wide as the longest."""
    lengths = torch.tensor([len(row) for row in rows])
    columns = torch.arange(max(int(lengths.max()), 1))
    mask = columns < lengths.unsqueeze(1)
    ids = torch.full(mask.shape, pad_token_id, dtype=torch.long)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": columns * mask}


def raw_prompts(data: DataProto) -> Iterable[list[Message]]:
    """Yield the messages of each row as text, with markers in place of images and videos.

    Raises: MissingRawPromptError, or RawPromptTypeError naming the row.
    """
    if "raw_prompt" not in data.non_tensor_batch:
        raise MissingRawPromptError(
            "the batch holds no raw_prompt, from which a reward model with reward_model.model.input_tokenizer renders "
            "the chat: set data.return_raw_chat=true, or input_tokenizer=null where policy and reward model share "
            "tokenizer and template"
        )
    for index, prompt in enumerate(data.non_tensor_batch["raw_prompt"]):
        if not isinstance(prompt, list | np.ndarray):
            raise RawPromptTypeError(
                f"raw_prompt of row {index} must be a list or array of messages, got {type(prompt).__name__}"
            )
        yield [_as_text(message) for message in prompt]


def _as_text(message: Message) -> Message:
    """Join the typed parts of a message into one text."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list | np.ndarray):
        return message
    parts = [part.get("text", "") if part.get("type") == "text" else f"<{part['type']}>" for part in message["content"]]
    return {**message, "content": "".join(parts)}
