"""Render the policy's prompts and responses by the chat template of a reward model, and tokenize them again."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.errors import ChatFormatError, MissingColumn, SequenceTooLongError, WrongInput, WrongType
from verl.protocol import DataProto, tensors_of
from verl.utils.chat import CUT, ChatFormat, ControlTexts, pieces, text_tokens
from verl.utils.chat.messages import TURNS_COLUMN

Message = dict[str, Any]
"""A message of a chat: ``role`` and ``content``, a text or a list of typed parts."""

_MODEL = "assistant"
_MARK = "whatwassaid"
_AS_IT_IS = "as_it_is"
"""Key of a message: its text has turns that were not kept apart, so a template must not look for thoughts in it."""


@dataclass
class ChatRenderer:
    """Render each conversation by the chat template of ``target`` and tokenize it again.

    Each turn stands as it was sampled, with its end. A template that knows no tools shows their answers as a user's.

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

        Raises: MissingColumn without ``raw_prompt``, WrongType for a row of another type, ValueError
            if the template rejects a chat, SequenceTooLongError for ``truncation=error``; each names the row.
        """
        prompts = raw_prompts(data)
        said = response_turns(data, self.source, self.ends)
        chats = list(zip(prompts, said, strict=True))
        texts = self._render(chats)
        rows: list[list[int]] = self.target(texts, add_special_tokens=False)["input_ids"]
        for index in (index for index, text in enumerate(texts) if CUT in text):
            rows[index] = text_tokens(self.target, texts[index])
        limit = self.max_length or tensors_of(data)["attention_mask"].shape[-1]
        cut = [self._cut(index, row, limit) for index, row in enumerate(rows)]
        pad: Any = self.target.pad_token_id
        return right_padded(cut, pad), sum(len(row) > limit for row in rows)

    def _render(self, chats: Sequence[tuple[list[Message], list[Message]]]) -> list[str]:
        shape = ChatFormat(self.target)
        has_tools = _has_tools(shape)
        before = _before_turns(shape)
        texts: list[str] = []
        for index, (prompt, said) in enumerate(starmap(_joined, chats)):
            said = [each if each["role"] == _MODEL else shape.control.of_others(each) for each in said]
            chat = [*prompt, *(said if has_tools else _by_users(said))]
            try:
                texts.append(_whole(shape, chat, len(prompt), before))
            except ChatFormatError as error:
                raise WrongInput(
                    f"row {index} of the batch, roles {[message.get('role') for message in chat]}: "
                    f"reward_model.model.path: {error}"
                ) from error
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


def _joined(prompt: list[Message], said: list[Message]) -> tuple[list[Message], list[Message]]:
    """Join an assistant's message that the prompt has begun with the turn that continues it."""
    if not prompt or not said or prompt[-1].get("role") != _MODEL:
        return prompt, said
    begun = prompt[-1].get("content") or ""
    return prompt[:-1], [{**said[0], "content": begun + said[0]["content"]}, *said[1:]]


def response_texts(data: DataProto, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> list[str]:
    """Decode the responses without the end-of-sequence tokens at their ends; such tokens between turns stay."""
    return [_text(ids, tokenizer, ends) for ids in _responses(data)]


def response_turns(
    data: DataProto, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Iterator[list[Message]]:
    """Yield the messages of each response: one per turn if the rollout has kept its turns, else one message."""
    kept = data.non_tensor_batch.get(TURNS_COLUMN, [None] * len(data))
    special = set(tokenizer.all_special_ids)
    control = ControlTexts(tokenizer)

    def shown_as(ids: Sequence[int], ends: Collection[int]) -> str:
        return control.text_of(_without_ends(ids, ends), lambda part: _decoded(part, tokenizer))

    for ids, turns in zip(_responses(data), kept, strict=True):
        shown = [turn for turn in turns or () if turn["start"] < min(turn["end"], len(ids))]
        if not any(turn["role"] == _MODEL for turn in shown):
            text = shown_as(ids, ends)
            has_turns = any(token in text for token in tokenizer.all_special_tokens)
            yield [{"role": _MODEL, "content": text, _AS_IT_IS: has_turns}]
            continue
        messages: list[Message] = []
        for turn in shown:
            if turn["role"] == _MODEL:
                said = ids[turn["start"] : turn["end"]]
                messages.append({"role": _MODEL, "content": shown_as(said, ends if turn is shown[-1] else special)})
            elif turn["calls"]:
                messages += [
                    {"role": "tool", "name": call["name"], "tool_call_id": f"call{at:05d}", "content": call["text"]}
                    for at, call in enumerate(turn["calls"])
                ]
            else:
                messages.append({"role": turn["role"], "content": turn["text"]})
        yield messages


def _responses(data: DataProto) -> list[list[int]]:
    batch = tensors_of(data)
    responses = batch["responses"].cpu()
    mask = batch["attention_mask"][:, -responses.shape[1] :].bool().cpu()
    return [ids[kept].tolist() for ids, kept in zip(responses, mask, strict=True)]


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> str:
    return _decoded(_without_ends(ids, ends), tokenizer)


def _without_ends(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    kept = list(ids)
    while kept and kept[-1] in ends:
        kept.pop()
    return kept


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _whole(shape: ChatFormat, chat: list[Message], num_prompt_messages: int, before: str) -> str:
    """Return the text of a conversation, with the turns after the prompt exactly as sampled.

    Args: ``before`` is what the template writes between its generation prompt and a turn; a policy samples it.
    Raises: ChatFormatError when the template rejects it.
    """
    asked = chat[:num_prompt_messages]
    sampled = [dict(message) for message in chat[num_prompt_messages:]]
    as_it_is = ""
    for message in sampled:
        if message.pop(_AS_IT_IS, False):
            as_it_is, message["content"] = message["content"].removeprefix(before), _MARK
        elif message["role"] == _MODEL and not before.strip():
            message["content"] = message["content"].removeprefix(before)
    try:
        found = pieces(shape, [*asked, *sampled], num_prompt_messages=num_prompt_messages)
        text = "".join(piece.text for piece in found)
    except ChatFormatError:  # where a template hides the start of a turn, it writes all of them
        text = shape.render([*asked, *sampled])
    return text.replace(_MARK, as_it_is) if as_it_is else text


def _before_turns(shape: ChatFormat) -> str:
    """Return the text between a template's generation prompt and a turn: blanks, or an empty thought."""
    asked = [{"role": "user", "content": "a"}]
    try:
        shown = shape.render(asked, True)
        whole = shape.render([*asked, {"role": _MODEL, "content": _MARK}])
    except ChatFormatError:
        return ""
    return whole[len(shown) :].partition(_MARK)[0] if whole.startswith(shown) else ""


def _has_tools(shape: ChatFormat) -> bool:
    """Whether a template renders tool answers; some templates reject or drop them."""
    roles = ("user", _MODEL, "tool", _MODEL)
    try:
        return _MARK in shape.render([{"role": role, "content": _MARK if role == "tool" else "a"} for role in roles])
    except ChatFormatError:
        return False


def _by_users(messages: Sequence[Message]) -> list[Message]:
    """Convert the tools' answers to user messages."""
    shown: list[Message] = []
    for message, before in zip(messages, [None, *messages], strict=False):
        if message["role"] != "tool":
            shown.append(message)
        elif before is not None and before["role"] == "tool":
            shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{message['content']}"}
        else:
            shown.append({"role": "user", "content": message["content"]})
    return shown


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

    Raises: MissingColumn, or WrongType naming the row.
    """
    if "raw_prompt" not in data.non_tensor_batch:
        raise MissingColumn(
            "the batch holds no raw_prompt, from which a reward model with reward_model.model.input_tokenizer renders "
            "the chat: set data.return_raw_chat=true, or input_tokenizer=null where policy and reward model share "
            "tokenizer and template"
        )
    for index, prompt in enumerate(data.non_tensor_batch["raw_prompt"]):
        if not isinstance(prompt, list | np.ndarray):
            raise WrongType(
                f"raw_prompt of row {index} must be a list or array of messages, got {type(prompt).__name__}"
            )
        yield [_as_text(message) for message in prompt]


def _as_text(message: Message) -> Message:
    """Join the typed parts of a message into one text."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list | np.ndarray):
        return message
    parts = [part.get("text", "") if part.get("type") == "text" else f"<{part['type']}>" for part in message["content"]]
    return {**message, "content": "".join(parts)}
