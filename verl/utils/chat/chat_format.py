"""Encode a conversation as tokens, piece by piece, with one tokenizer and chat template."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.errors import ChatFormatError
from verl.utils.chat.boundary import Boundary, SpecialTokens, first_difference
from verl.utils.chat.messages import THOUGHTS, Message, Turn, marked, plain, with_text_arguments, with_tool_calls
from verl.utils.chat.others import ControlTexts, media_parts, text_tokens
from verl.utils.chat.proof import prove_pieces
from verl.utils.chat_template import check_awaits_turn, render_chat
from verl.utils.json_types import Json
from verl.utils.tokenizer import one_thread

if TYPE_CHECKING:
    from PIL.Image import Image

    from verl.utils.chat.messages import Video

_MARK = "sampledturn"
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Appended:
    """Tokens that continue a trajectory after a sampled turn; earlier tokens stay as they are."""

    token_ids: list[int]


@dataclass(frozen=True)
class Restarted:
    """A new prompt, because the template shows earlier turns differently now."""

    prompt_ids: list[int]
    reason: str


class ChatFormat:
    """Writes conversations as tokens, in the form of a tokenizer's chat template.

    Sampled tokens are never decoded and encoded again. The tokens after a sampled turn come from the text of the whole
    conversation, from the end of that turn on: a mark stands for the sampled content, and shows where it ends.
    ``control.of_others`` prepares messages of tools and users, so that no text of theirs becomes a control token.

    Args:
        tokenizer: encodes; its chat template is used if the processor has none.
        processor: of a model that sees images; it writes the placeholders of images and videos.
        options: arguments of ``apply_chat_template``, ``enable_thinking`` for instance.
        tools: schemas of the tools that prompts offer.
        media_options: arguments of the processor for images and videos, as ``mm_processor_kwargs`` of the engine.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
        options: Mapping[str, Json] = {},
        tools: Sequence[Message] = (),
        media_options: Mapping[str, Json] = {},
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        owns_template = processor is not None and getattr(processor, "chat_template", None)
        self.templater = processor if processor is not None and owns_template else tokenizer
        self.options = {**options, "tokenize": False}
        self.tools = [dict(tool) for tool in tools]
        self.media_options = dict(media_options)
        self._text_arguments = False
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = SpecialTokens([*added, *tokenizer.all_special_tokens], tokenizer.eos_token)
        self.control = ControlTexts(tokenizer)

    def with_options(self, options: Mapping[str, Json], tools: Sequence[Message]) -> "ChatFormat":
        """Return the format with other options and tools."""
        other = copy.copy(self)
        other.options = {**options, "tokenize": False}
        other.tools = [dict(tool) for tool in tools]
        return other

    # ---- for callers

    def prompt(
        self, messages: Sequence[Message], images: Sequence["Image"] = (), videos: Sequence["Video"] = ()
    ) -> list[int]:
        """Return the tokens of messages with the generation prompt.

        Placeholders stand for images and videos, one token each, as engines take them. With ``images`` or ``videos``
        the processor expands them.

        Raises: WrongInput if the last message is an assistant's; ChatFormatError when the template rejects the
            messages.
        """
        check_awaits_turn(messages)
        return self.encode(self.render(plain(messages), generation_prompt=True), images, videos)

    def after_turn(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        *,
        stopped: bool,
        keep_history: bool = True,
        generation_prompt: bool = True,
        images: Sequence["Image"] = (),
        videos: Sequence["Video"] = (),
        last_token: int | None = None,
    ) -> Appended | Restarted:
        """Return the tokens after a sampled turn: the rest of its end, the added messages, the generation prompt.

        Args:
            messages: the conversation up to the sampled turn, which is the last one.
            added: tool and user messages after it. Give tool messages ``name`` and ``tool_call_id``: some templates
                write them.
            stopped: whether the sampled tokens end with the end of the turn; otherwise (a turn cut at its longest
                length) the result starts with it.
            keep_history: keep earlier turns as they were sampled. Otherwise the result is ``Restarted`` where the
                template now writes them differently, apart from blanks around what was sampled.
            generation_prompt: end the tokens with one; a ``Restarted`` prompt always does.
            images: the images of all messages; only needed where the processor expands placeholders.
            videos: likewise, each as (frames, metadata).
            last_token: the last sampled token. A model may end a turn with another token than the template; the one
                that it sampled stays, and headers that the template needs are written after it.

        Raises: ChatFormatError when the template rejects the messages, or marks no end of the turn.
        """
        history = plain(messages)
        new = plain(added)
        if not history or history[-1]["role"] != "assistant":
            raise ChatFormatError("after_turn needs the sampled assistant message as the last of its messages")
        if not keep_history:
            reason = self._rewritten(history, new)
            if reason is not None:
                return Restarted(self.prompt([*history, *new], images, videos), reason)
        boundary = self.boundary(history, new, generation_prompt=generation_prompt)
        last_images = images[len(images) - _media_count(new, "image") :]
        last_videos = videos[len(videos) - _media_count(new, "video") :]
        ids = self.encode(boundary.end + boundary.after, last_images, last_videos)
        is_header = self.special.start_length(boundary.last) == 0  # the next turn's header: this turn has no end token
        is_sampled = stopped and not (is_header and last_token is not None and last_token != ids[0])
        return Appended(ids[1:] if is_sampled else ids)

    def is_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens of a turn end with a special token, as they do when the model has ended the turn."""
        return self.special.start_length(self.decode(token_ids[-1:])) > 0

    def prove(self) -> None:
        """Render test conversations as a whole and in pieces, with tool calls if there are tools, and compare both.

        Raises: ChatFormatError with both texts and the template's fault.
        """
        prove_pieces(self)

    # ---- how it is found

    def boundary(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        *,
        generation_prompt: bool = True,
        needs_end: bool = True,
    ) -> Boundary:
        """Return the text after the content of the last of ``messages``, an assistant's turn.

        Args:
            generation_prompt: end it with one.
            needs_end: refuse a template that marks no end of the turn; otherwise ``end`` is then empty.

        Raises: ChatFormatError.
        """
        completed = with_tool_calls([*messages, *added])
        forms = ((messages, added), (completed[: len(messages)], completed[len(messages) :]))
        rejected: ChatFormatError | None = None
        for history, new in forms:
            try:
                texts = self._after_mark(history, new, generation_prompt)
            except ChatFormatError as error:
                rejected = rejected or error
                continue
            found = texts and (
                self.special.boundary(*texts) or (None if needs_end else Boundary("", texts[1], texts[0]))
            )
            if found:
                return found
        if rejected is not None:
            raise rejected
        raise ChatFormatError(
            "the chat template marks the end of an assistant's turn by no special token: give the model a template "
            "that does (actor_rollout_ref.model.custom_chat_template)"
        )

    def marked_turn(self, history: Sequence[Message]) -> str:
        """Render messages up to the content of the last one, an assistant's turn."""
        mark = _unused_mark(history)
        return self.render([*history[:-1], marked(history[-1], mark)]).rpartition(mark)[0]

    def _after_mark(
        self, history: Sequence[Message], new: Sequence[Message], generation_prompt: bool
    ) -> tuple[str, str] | None:
        """Return the texts after the content of the last turn: at the end of the conversation, and before ``new``."""
        mark = _unused_mark([*history, *new])
        turns = [marked(history[-1], mark)]
        if "tool_calls" in turns[0]:  # for templates that do not write arguments
            turns.append({"role": "assistant", "content": mark})
        for turn in turns:
            last = self.render([*history[:-1], turn])
            followed = self.render([*history[:-1], turn, *new], generation_prompt)
            if mark in last and mark in followed:
                return last.rpartition(mark)[2], followed.rpartition(mark)[2]
        return None

    def _rewritten(self, history: list[Turn], new: list[Turn]) -> str | None:
        """Return how the template changes the prompt or hides part of the turn once messages are added; else None."""
        *before, turn = history
        shown = self.render(before, generation_prompt=True)
        followed = self.render([*history, *new], generation_prompt=True)
        if not followed.startswith(shown):
            was, now = first_difference(shown, followed)
            return f"the chat template wrote {was!r} before the turn, and now writes {now!r}"
        boundary = self.boundary(history, new)
        kept = followed.removesuffix(boundary.end + boundary.after)
        # Where the generation prompt opens a thought, the message may have that opening too.
        prompt = len(os.path.commonprefix([shown, self.render(before)]))
        said = turn.get("content")
        if isinstance(said, str) and _squashed(said) not in _squashed(kept[prompt:]):
            return f"the chat template writes {_short(kept[prompt:])} now for a turn of {_short(said)}"
        mark = _unused_mark([*history, *new])
        for name in THOUGHTS:
            if turn.get(name) and mark not in self.render([*before, {**turn, name: mark}, *new]):
                return f"the chat template does not write the field {name!r} of an earlier turn"
        return None

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the text of messages.

        Raises: ChatFormatError when the template rejects them.
        """
        options = {**self.options, "add_generation_prompt": generation_prompt, "tools": self.tools or None}
        given = with_text_arguments(messages) if self._text_arguments else list(messages)
        try:
            return render_chat(self.templater, given, options)
        except Exception as error:  # templates are programs: they raise TypeError for a missing text, for instance
            if not self._text_arguments and any(message.get("tool_calls") for message in messages):
                try:  # some templates, DeepSeek's for instance, join the arguments of a call to other text
                    text = render_chat(self.templater, with_text_arguments(messages), options)
                except Exception:  # the first error is told
                    pass
                else:
                    self._text_arguments = True
                    return text
            raise ChatFormatError(f"the chat template rejects the conversation: {error}") from error

    def encode(self, text: str, images: Sequence["Image"] = (), videos: Sequence["Video"] = ()) -> list[int]:
        """Return the tokens of a text, in which ``control`` may have made cuts."""
        if not images and not videos:
            return text_tokens(self.tokenizer, text)
        if self.processor is None:
            raise ChatFormatError("images and videos need the processor of a vision-language model")
        return [token for part in media_parts(text, self.processor, images, videos) for token in self._shown(*part)]

    def _shown(self, text: str, images: Sequence["Image"], videos: Sequence["Video"]) -> list[int]:
        """Return the tokens of a text without cuts, including the tokens of its images and videos."""
        assert self.processor is not None
        media: dict[str, Any] = {**self.media_options, **({"images": list(images)} if images else {})}
        if videos:
            media["videos"] = [frames for frames, _ in videos]
            media["video_metadata"] = [metadata for _, metadata in videos]
            media["do_sample_frames"] = False
        with one_thread(self.tokenizer):
            return list(self.processor(text=[text], add_special_tokens=False, **media)["input_ids"][0])

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the tokens of a text after a preceding text; encode it alone if both would merge."""
        ids = self.encode(before)
        both = self.encode(before + text)
        return both[len(ids) :] if both[: len(ids)] == ids else self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text if isinstance(text, str) else "".join(text)


def _media_count(messages: Sequence[Message], kind: str) -> int:
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return sum(isinstance(part, Mapping) and part.get("type") == kind for part in parts)


def _unused_mark(messages: Sequence[Message]) -> str:
    said = repr(messages)
    return next(mark for mark in (f"{_MARK}{i}end" for i in range(len(said) + 1)) if mark not in said)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def _squashed(text: str) -> str:
    return "".join(text.split())
