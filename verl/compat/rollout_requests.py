"""A conversation that user code drives: messages go in; tokens, masks, positions and rewards come out.

The established verl interface calls it ``AsyncRolloutRequest`` and uses it with SGLang. Agent loops are the way to
train with turns; both write conversations by ``verl.utils.chat``.
"""

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.tools.schemas import Message, OpenAIFunctionToolCall, OpenAIFunctionToolSchema, ToolResponse
from verl.utils.chat import Appended, ChatFormat, whole_differences, written_turn
from verl.utils.chat import SanityCheckMode as TokenizationSanityCheckModeEnum
from verl.utils.dataset.vision_utils import encoded_media, load_video, model_inputs, process_image
from verl.utils.vision.fetching import check_no_address
from verl.utils.vision.limits import DEFAULT_MEDIA, MediaConfig
from verl.utils.vision.positions import VisionRope, media_texts, position_ids, vision_rope

logger = logging.getLogger(__name__)

ProcessingClass = PreTrainedTokenizerBase | ProcessorMixin
_KINDS = ("image", "video")
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "loss_mask")
_PARTS = ("ids", "attention_mask", "position_ids", "loss_mask")
"""Fields of prompt and response that go with those of ``_PER_TOKEN``."""
_PROVEN: "WeakKeyDictionary[Any, set[str]]" = WeakKeyDictionary()
"""Tokenizers and processors, and what was shown of each to be written in pieces as a whole."""


class AsyncRolloutRequestStateEnum(StrEnum):
    """States of a request: its driver sets them, and ``finalize`` sets the last one."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"


class FinishReasonTypeEnum(StrEnum):
    """Why a turn has ended."""

    LENGTH = "length"
    STOP = "stop"
    TOOL_CALL = "tool_calls"

    @classmethod
    def from_str(cls, value: str) -> "FinishReasonTypeEnum":
        """Return the reason that an engine names.

        Raises: ValueError naming the known ones.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f"finish reason {value!r} is unknown: it must be one of {', '.join(cls)}") from None


class AsyncRolloutRequest(BaseModel):
    """A growing trajectory.

    Tokens are appended, and text is never encoded again: sampled tokens stay as they are, and the tokens after them
    come from the chat template. Tensors have one row, (1, T); ``position_ids`` are (4, T) for models with vision axes.
    Prompt and response have the same fields with ``prompt_`` and ``response_`` before their names.

    Attributes:
        messages: the conversation, that of the prompt first.
        multi_modal_data: images by ``image``, and videos, each as (frames, metadata), by ``video``.
        multi_modal_inputs: the processor's tensors of these images and videos.
        loss_mask: 1 for what the assistant said, 0 for the prompt, tools and users.
        rollout_log_probs: (1, R), 0 where the loss mask is; None if a turn came without.
        reward_scores: rewards by tool, and ``user_turn_rewards``.
        metrics: the values that ``update_metrics`` was given, by tool.
        use_inference_chat_template: let the engine see the conversation as the template writes it as a whole.
        apply_chat_template_kwargs: arguments of the template.
        mm_processor_kwargs: arguments of the processor for images and videos.
        media: limits of the images and videos of tools, the node ``data.media``.

    Args:
        processing_class: tokenizer, or the processor of a model that sees images.
        input_ids, attention_mask, position_ids: of the prompt, if it is given as tokens.

    Raises: ValueError without ``messages``, ``max_prompt_len`` or ``processing_class``, and for a chat template that
        cannot be written in pieces.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    batch_data_id: int = 0
    rollout_offset: int = 0
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    state: AsyncRolloutRequestStateEnum = AsyncRolloutRequestStateEnum.PENDING
    messages: list[Message]
    multi_modal_keys: list[str] | None = None
    multi_modal_data: dict[str, Any] | None = None
    multi_modal_inputs: dict[str, Any] | None = None
    tool_schemas: list[OpenAIFunctionToolSchema] | None = None
    tools_kwargs: dict[str, Any] = Field(default_factory=dict)
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    input_ids: Tensor | None = None
    prompt_ids: Tensor | None = None
    response_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    prompt_attention_mask: Tensor | None = None
    response_attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    prompt_position_ids: Tensor | None = None
    response_position_ids: Tensor | None = None
    loss_mask: Tensor | None = None
    prompt_loss_mask: Tensor | None = None
    response_loss_mask: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    reward_scores: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, list[Any]] = Field(default_factory=dict)
    max_prompt_len: int
    max_response_len: int = 8192
    max_model_len: int = 32768
    use_inference_chat_template: bool = False
    tokenization_sanity_check_mode: TokenizationSanityCheckModeEnum = TokenizationSanityCheckModeEnum.STRICT
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    media: MediaConfig = Field(default=DEFAULT_MEDIA, exclude=True)

    _engine_ids: list[int] = PrivateAttr(default_factory=list)
    """The tokens as the engine takes them: one for each image, where ``input_ids`` has all that the model sees."""
    _log_probs: list[float] | None = PrivateAttr(default_factory=list)
    _encoded: dict[str, Any] = PrivateAttr(default_factory=dict)
    """What the processor makes of all images and videos."""
    _num_turns: int = PrivateAttr(default=0)
    _of_others: set[int] = PrivateAttr(default_factory=set)
    _num_standing: int = PrivateAttr(default=0)
    """How many messages have tokens that stand: those up to the last turn, or of a prompt that is given as tokens.

    What follows them is written anew when a message is added.
    """
    _ends: tuple[int, int] = PrivateAttr(default=(0, 0))
    """Where what stands ends, in ``input_ids`` and for the engine."""
    _stopped: bool = PrivateAttr(default=False)
    """Whether the last turn has its end."""
    _waits: bool = PrivateAttr(default=False)
    """Whether the tokens end with a generation prompt."""

    def __init__(self, processing_class: Any = None, **fields: Any) -> None:
        fields["messages"] = list(fields["messages"]) if fields.get("messages") is not None else []
        for name in ("messages", "max_prompt_len"):
            if not fields.get(name):
                raise ValueError(f"{name} is required for AsyncRolloutRequest")
        if processing_class is None:
            raise ValueError("processing_class is required for AsyncRolloutRequest")
        super().__init__(**fields)
        self.multi_modal_keys = self.multi_modal_keys or list(_KINDS)
        data = self.multi_modal_data or {}
        self.multi_modal_data = {key: list(data.get(key) or ()) for key in self.multi_modal_keys}
        chat = self._proven_chat(processing_class)
        self._encode_media(chat)
        if self.input_ids is None or self.attention_mask is None or self.position_ids is None:
            self._write(chat, generation_prompt=True)
        else:
            self._take_prompt(chat)
        assert self.prompt_ids is not None
        if self.prompt_ids.shape[-1] > self.max_prompt_len:
            logger.warning(
                "request %s (row %d): its prompt has %d tokens with tools and chat template, and max_prompt_len is %d",
                *(self.request_id, self.batch_data_id, self.prompt_ids.shape[-1], self.max_prompt_len),
            )

    # ---- what the engine and the others say

    def get_generation_prompt_ids(self, processing_class: ProcessingClass) -> list[int]:
        """Return the prompt tokens for the engine; append the generation prompt if it is missing.

        An image is one token in them, since engines expand it.
        """
        chat = self._chat(processing_class)
        if not self._waits:
            self._write(chat, generation_prompt=True)
        return chat.prompt(self._as_chat(chat)) if self.use_inference_chat_template else list(self._engine_ids)

    def add_user_message(self, processing_class: ProcessingClass, content: str | list[dict[str, Any]]) -> None:
        """Append a user message.

        Raises: ValueError before the first turn if the prompt was given as tokens.
        """
        chat = self._chat(processing_class)
        self._add(chat, [Message(role="user", content=_without_media(chat, content))], of_others=self._num_turns > 0)

    def add_assistant_message(
        self,
        processing_class: ProcessingClass,
        content: str,
        content_ids: Tensor | Sequence[int] | None = None,
        tool_calls: Sequence[OpenAIFunctionToolCall | dict[str, Any]] | None = None,
        log_probs: Sequence[float] | None = None,
    ) -> None:
        """Append a turn of the assistant.

        Args:
            content_ids: the tokens that the model sampled, with the one that ends the turn; they are taken as they
                are. Without them the turn is written by the chat template.
            log_probs: those of ``content_ids``.
        Raises: ValueError for another number of log-probabilities than of tokens.
        """
        chat = self._chat(processing_class)
        if not self._waits:
            self._write(chat, generation_prompt=True)
        message = Message(role="assistant", content=content, tool_calls=list(tool_calls) if tool_calls else None)
        if content_ids is None:
            ids = written_turn(chat, [*self._as_chat(chat), message.as_chat()])
        else:
            ids = [int(token) for token in torch.as_tensor(content_ids).flatten().tolist()]
        if log_probs is not None and len(log_probs) != len(ids):
            raise ValueError(f"the turn has {len(ids)} tokens and {len(log_probs)} log-probabilities")
        self.messages.append(message)
        self._engine_ids += ids
        self._set_tokens(chat, self._row("input_ids") + ids, self._row("loss_mask") + [1] * len(ids))
        self._note_log_probs(log_probs)
        self._ends = (len(self._row("input_ids")), len(self._engine_ids))
        self._num_standing = len(self.messages)
        self._stopped = chat.is_ended(ids)
        self._waits = False
        self._num_turns += 1

    def add_tool_response_messages(
        self, processing_class: ProcessingClass, contents: Sequence[ToolResponse | str]
    ) -> None:
        """Append the tools' answers to the calls of the last turn, in order; append nothing if all are empty.

        Images and videos are loaded and resized as those of data rows are.

        Raises: ValueError for images and videos with a tokenizer, and before the first turn if the prompt was given as
            tokens; MediaError for those that cannot be read.
        """
        answers = [ToolResponse(text=each) if isinstance(each, str) else each for each in contents]
        if all(answer.is_empty() for answer in answers):
            return
        said = next((message for message in reversed(self.messages) if message.role == "assistant"), None)
        calls = (said.as_chat()["tool_calls"] if said else None) or []
        chat = self._chat(processing_class)
        self._check_may_add()
        self._take_media(chat, answers)
        messages = []
        for answer, call in zip_longest(answers, calls[: len(answers)]):
            known = {"name": call["function"]["name"], "tool_call_id": call.get("id")} if call else {}
            messages.append(Message(role="tool", content=_without_media(chat, answer.as_content()), **known))
        self._add(chat, messages, of_others=True)

    def update_metrics(self, metrics: Any, tool_id: str) -> None:
        """Record the metrics of a tool call."""
        self.metrics.setdefault(tool_id, []).append(metrics)

    def finalize(
        self,
        processing_class: ProcessingClass,
        reward_scores: Mapping[str, Any],
        finish_reason_type: FinishReasonTypeEnum = FinishReasonTypeEnum.STOP,
    ) -> None:
        """Complete the request: drop an unused generation prompt, compare with the template, and cut to the limits.

        A difference between the trajectory and its conversation as a whole is logged and changes nothing.

        Raises: ValueError for a request that waits for tools.
        """
        if finish_reason_type not in (FinishReasonTypeEnum.STOP, FinishReasonTypeEnum.LENGTH):
            raise ValueError(f"request {self.request_id}: finish reason {finish_reason_type} does not end a request")
        self.state = AsyncRolloutRequestStateEnum.COMPLETED
        self.reward_scores = dict(reward_scores)
        chat = self._chat(processing_class)
        if self._num_turns:
            self._compare(chat)
            self._write(chat, generation_prompt=False)
        self.truncate_output_ids(processing_class)

    def truncate_output_ids(self, processing_class: ProcessingClass) -> None:
        """Cut the sequence to ``max_model_len`` and the response to ``max_response_len``; set the response's fields."""
        assert self.prompt_ids is not None
        start = self.prompt_ids.shape[-1]
        for name, part in zip(_PER_TOKEN, _PARTS, strict=True):
            whole = getattr(self, name)[..., : self.max_model_len]
            setattr(self, name, whole)
            setattr(self, f"response_{part}", whole[..., start:][..., : self.max_response_len])
        assert self.response_ids is not None
        if self._log_probs is not None:
            size = self.response_ids.shape[-1]
            padded = self._log_probs + [0.0] * (size - len(self._log_probs))  # tools or users came last
            self.rollout_log_probs = torch.tensor([padded[:size]])

    # ---- how tokens are written

    def _chat(self, processing_class: ProcessingClass) -> ChatFormat:
        processor = processing_class if isinstance(processing_class, ProcessorMixin) else None
        tokenizer: Any = processing_class if processor is None else processor.tokenizer
        tools = [tool.model_dump(exclude_none=True) for tool in self.tool_schemas or ()]
        return ChatFormat(tokenizer, processor, self.apply_chat_template_kwargs, tools, self.mm_processor_kwargs)

    def _proven_chat(self, processing_class: ProcessingClass) -> ChatFormat:
        """Return the chat format; it is proven once for each template with its options and tools."""
        chat = self._chat(processing_class)
        key = json.dumps([getattr(chat.templater, "chat_template", None), chat.options, chat.tools], default=str)
        proven = _PROVEN.setdefault(processing_class, set())
        if key not in proven:
            chat.prove()
            proven.add(key)
        return chat

    def _as_chat(self, chat: ChatFormat) -> list[dict[str, Any]]:
        """Return the messages in the form of the chat template, with cuts in the texts of tools and users."""
        shown = [message.as_chat() for message in self.messages]
        return [chat.control.of_others(each) if at in self._of_others else each for at, each in enumerate(shown)]

    def _row(self, name: str) -> list[int]:
        """Return a field of the tokens so far as a list."""
        value: Tensor | None = getattr(self, name)
        return [] if value is None else value[0].tolist()

    def _add(self, chat: ChatFormat, messages: Sequence[Message], of_others: bool) -> None:
        self._check_may_add()
        if of_others:
            self._of_others.update(range(len(self.messages), len(self.messages) + len(messages)))
        self.messages += messages
        self._write(chat, generation_prompt=False)

    def _check_may_add(self) -> None:
        if self._num_standing and not self._num_turns:
            raise ValueError(
                f"request {self.request_id}: its prompt was given as input_ids: add messages after the first turn, or "
                "give all of them as messages, without input_ids"
            )

    def _write(self, chat: ChatFormat, *, generation_prompt: bool) -> None:
        """Encode the messages that have no tokens yet; before the first turn the whole conversation is the prompt."""
        shown: dict[str, Any] = {f"{kind}s": (self.multi_modal_data or {}).get(kind) or () for kind in _KINDS}
        if not self._num_standing:
            messages = self._as_chat(chat)
            self._engine_ids = chat.prompt(messages)
            seen = chat.prompt(messages, **shown) if self._encoded else self._engine_ids
            self._set_tokens(chat, seen, [0] * len(seen))
            self._set_prompt()
        elif self._num_turns:
            standing = self._as_chat(chat)[: self._num_standing]
            new = self._as_chat(chat)[self._num_standing :]
            engine_ids: list[int] = []
            seen = []
            if new or generation_prompt:
                options: dict[str, Any] = {
                    "stopped": self._stopped,
                    "last_token": self._engine_ids[self._ends[1] - 1],
                    "generation_prompt": generation_prompt,
                }
                engine_ids = _appended(chat.after_turn(standing, new, **options))
                seen = _appended(chat.after_turn(standing, new, **options, **shown)) if self._encoded else engine_ids
            end, engine_end = self._ends
            self._engine_ids = self._engine_ids[:engine_end] + engine_ids
            self._set_tokens(chat, self._row("input_ids")[:end] + seen, self._row("loss_mask")[:end] + [0] * len(seen))
            self._waits = generation_prompt

    def _take_prompt(self, chat: ChatFormat) -> None:
        """Take a prompt of tokens, which ends with a generation prompt."""
        ids = torch.as_tensor(self.input_ids).reshape(1, -1).long()
        self._engine_ids = chat.prompt(self._as_chat(chat)) if self._encoded else ids[0].tolist()
        self._set_tokens(chat, ids[0].tolist(), [0] * ids.shape[-1])
        self._set_prompt()
        self._ends, self._num_standing = (ids.shape[-1], len(self._engine_ids)), len(self.messages)

    def _set_prompt(self) -> None:
        for name, part in zip(_PER_TOKEN, _PARTS, strict=True):
            setattr(self, f"prompt_{part}", getattr(self, name))
        self._waits = True

    def _set_tokens(self, chat: ChatFormat, ids: list[int], loss_mask: list[int]) -> None:
        self.input_ids, self.loss_mask = torch.tensor([ids]), torch.tensor([loss_mask])
        self.attention_mask = torch.ones_like(self.input_ids)
        # A sampled image token does not stand for an image.
        text = self.input_ids[0].masked_fill(self.loss_mask[0] == 1, -1)
        positions = position_ids(_rope_of(chat), text, self.attention_mask[0], self._encoded)
        self.position_ids = positions if positions.dim() == 2 else positions[None]

    # ---- the rest

    def _encode_media(self, chat: ChatFormat) -> None:
        media = self.multi_modal_data or {}
        if any(media.get(kind) for kind in _KINDS):
            self._encoded = encoded_media(self._processor_of(chat), media, chat.media_options)
        if self._encoded or self.multi_modal_inputs is None:
            self.multi_modal_inputs = model_inputs(self._encoded)

    def _processor_of(self, chat: ChatFormat) -> ProcessorMixin:
        if chat.processor is None:
            raise ValueError(
                f"request {self.request_id} has images or videos: give the processor of a model that sees them as "
                "processing_class"
            )
        return chat.processor

    def _take_media(self, chat: ChatFormat, answers: Sequence[ToolResponse]) -> None:
        """Load the images and videos of answers, and append them to those of the conversation."""
        new = {kind: [one for answer in answers for one in getattr(answer, kind) or ()] for kind in _KINDS}
        if not any(new.values()):
            return
        check_no_address(self.media, new)
        size = getattr(getattr(self._processor_of(chat), "image_processor", None), "patch_size", None) or 14
        videos = [load_video(video, image_patch_size=size, media=self.media) for video in new["video"]]
        data: dict[str, Any] = self.multi_modal_data if self.multi_modal_data is not None else {}
        data.setdefault("image", []).extend(process_image(image, size, self.media) for image in new["image"])
        data.setdefault("video", []).extend((frames.numpy(), metadata) for frames, metadata in videos)
        self.multi_modal_data = data
        self._encode_media(chat)

    def _note_log_probs(self, log_probs: Sequence[float] | None) -> None:
        """Keep the log-probabilities of a turn that has just been appended, aligned with the response."""
        if log_probs is None or self._log_probs is None or self.prompt_ids is None:
            self._log_probs = None
            return
        before = len(self._row("input_ids")) - self.prompt_ids.shape[-1] - len(log_probs)
        self._log_probs += [0.0] * (before - len(self._log_probs)) + [float(value) for value in log_probs]

    def _compare(self, chat: ChatFormat) -> None:
        mode = self.tokenization_sanity_check_mode
        ids = self._engine_ids[: self._ends[1]]
        found = whole_differences(chat, self._as_chat(chat)[: self._num_standing], ids, mode)
        if found:
            logger.warning(
                "request %s: tokenization_sanity_check_mode=%s: the tokens differ from the conversation that the chat "
                "template renders as a whole in %d places, %s; they stay as they are",
                *(self.request_id, mode, len(found), found[0]),
            )


def _without_media(chat: ChatFormat, content: Any) -> Any:
    """Return the content of a message without tokens in its text that would stand for images."""
    if not isinstance(content, str):
        return [{**part, "text": _without_media(chat, part["text"])} if "text" in part else part for part in content]
    for text in media_texts(_rope_of(chat), chat.tokenizer):
        content = content.replace(text, "")
    return content


def _rope_of(chat: ChatFormat) -> VisionRope | None:
    return None if chat.processor is None else vision_rope(chat.processor)


def _appended(grown: Any) -> list[int]:
    assert isinstance(grown, Appended)  # history is kept
    return grown.token_ids
