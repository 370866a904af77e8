"""A growing trajectory: tokens are appended, and never tokenized again from text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl.experimental.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.base import ToolCall as ToolCall
from verl.experimental.agent_loop.base import Turn as Turn
from verl.utils.chat.messages import TURNS_COLUMN as TURNS_COLUMN
from verl.utils.json_types import JsonObject
from verl.utils.numerics.seeding import derive_seed
from verl.workers.rollout.server import TokenOutput

if TYPE_CHECKING:
    from PIL.Image import Image

    from verl.utils.chat.messages import Video

MODEL = "assistant"


def turn_seed(seed: int, turn: int) -> int:
    """Return the sampling seed of a turn of the model: the row's seed for turn 0, a seed derived from it for others."""
    return seed if turn == 0 else derive_seed(seed, "turn", turn)


def turn_columns(turns: Iterable[Turn]) -> list[JsonObject]:
    """Return turns for the column ``TURNS_COLUMN``, which dumps, metrics and reports read."""
    return [asdict(turn) for turn in turns]


class Trajectory:
    """The tokens of one sample, from its prompt on.

    A tokenizer writes an image as one token, and the engine as many. ``token_ids`` has them as the tokenizer writes
    them, since that is what the engine takes; ``prompt_ids`` and ``response_ids`` have them all, since training reads
    them.

    Args: ``limit`` is the most tokens of the response; ``multi_modal_data`` holds images and videos of the prompt,
        to which those of later turns are appended.
    """

    def __init__(
        self, prompt_ids: Sequence[int], limit: int, multi_modal_data: Mapping[str, Any] | None = None
    ) -> None:
        self.token_ids = list(prompt_ids)
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.multi_modal_data = {name: list(items) for name, items in (multi_modal_data or {}).items()}
        self.turns: list[Turn] = []
        self._num_later_media = {"image": 0, "video": 0}
        self._limit = limit
        self._log_probs: list[float] | None = []

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return self._limit - len(self.response_ids)

    def sampled(self, output: TokenOutput, seconds: float = 0.0) -> Turn:
        """Append the sampled tokens after ``token_ids``; return their turn.

        Raises: ValueError for more tokens than there is room for, another number of log-probabilities, or a prompt
            that the engine saw with other tokens.
        """
        tokens = output.token_ids
        log_probs = output.log_probs
        if len(tokens) > self.room:
            raise ValueError(f"{len(tokens)} tokens were sampled, the response has room for {self.room}")
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens were sampled, with {len(log_probs)} log-probabilities")
        if output.expanded_prompt_ids is not None:
            self._take_expanded(list(output.expanded_prompt_ids))
        if log_probs is None:
            self._log_probs = None
        turn = self._append(MODEL, tokens, tokens, 1, log_probs)
        turn.seconds = seconds
        turn.finish_reason = output.finish_reason
        turn.versions = list(output.versions)
        return turn

    def add(
        self,
        role: str,
        token_ids: Sequence[int],
        seconds: float = 0.0,
        calls: Sequence[ToolCall] = (),
        text: str | None = None,
        images: Sequence["Image"] = (),
        expanded_ids: Sequence[int] | None = None,
        videos: Sequence["Video"] = (),
    ) -> bool:
        """Append a message of a tool or user, with the tokens that the chat template puts around it.

        Args: ``images`` and ``videos``, each as (frames, metadata), are those of ``token_ids``; ``expanded_ids`` are
            the same tokens as the engine will see them.
        Returns: whether they fit; if not, nothing is appended.
        Raises: ValueError for images or videos without ``expanded_ids``, whose tokens cannot be counted.
        """
        media = {"image": images, "video": videos}
        if (images or videos) and expanded_ids is None:
            count = " and ".join(f"{len(items)} {kind}s" for kind, items in media.items() if items)
            raise ValueError(f"{count} come without the tokens that the engine makes of them")
        seen = list(token_ids if expanded_ids is None else expanded_ids)
        if len(seen) > self.room:
            return False
        turn = self._append(role, token_ids, seen, 0, [0.0] * len(seen))
        turn.seconds = seconds
        turn.calls = list(calls)
        turn.text = text
        for kind, items in media.items():
            if items:
                self.multi_modal_data.setdefault(kind, []).extend(items)
                self._num_later_media[kind] += len(items)
        return True

    def output(self, **fields: Any) -> AgentLoopOutput:
        """Return the trajectory so far; ``fields`` set further fields of ``AgentLoopOutput``, or replace fields."""
        seconds = dict.fromkeys((MODEL, "tool"), 0.0)
        for turn in self.turns:
            seconds[turn.role] = seconds.get(turn.role, 0.0) + turn.seconds
        made = {
            "prompt_ids": list(self.prompt_ids),
            "response_ids": list(self.response_ids),
            "response_mask": list(self.response_mask),
            "response_logprobs": None if self._log_probs is None else list(self._log_probs),
            "multi_modal_data": self.multi_modal_data or None,
            "num_later_images": self._num_later_media["image"],
            "num_later_videos": self._num_later_media["video"],
            "num_turns": 1 + len(self.turns),
            "metrics": AgentLoopMetrics(generate_sequences=seconds[MODEL], tool_calls=seconds["tool"]),
            "turns": list(self.turns),
        }
        return AgentLoopOutput(**(made | fields))

    def _append(
        self, role: str, token_ids: Sequence[int], seen: Sequence[int], mask: int, log_probs: Sequence[float] | None
    ) -> Turn:
        turn = Turn(role, len(self.response_ids), len(self.response_ids) + len(seen))
        self.token_ids.extend(token_ids)
        self.response_ids.extend(seen)
        self.response_mask.extend([mask] * len(seen))
        if self._log_probs is not None and log_probs is not None:
            self._log_probs.extend(log_probs)
        self.turns.append(turn)
        return turn

    def _take_expanded(self, expanded: list[int]) -> None:
        """Take the prompt as the engine saw it; the engine must have seen the response so far unchanged."""
        size = len(expanded) - len(self.response_ids)
        if not self.turns:
            self.prompt_ids = expanded
        elif expanded != [*self.prompt_ids, *self.response_ids]:
            raise ValueError(
                f"the engine made {size} tokens of the prompt and its images, and the trajectory has "
                f"{len(self.prompt_ids)}; or it saw other tokens in the {len(self.response_ids)} of the response: "
                "engine and processor must have the same mm_processor_kwargs"
            )
