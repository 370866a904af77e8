"""Time spans of a trajectory, for the step's timeline and for the trajectory's trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.batch import Place
from verl.utils.json_types import Json, JsonObject
from verl.utils.observe import timeline
from verl.utils.observe.rollout_trace import Keep, rollout_trace_attr, rollout_trace_span

Outputs = AgentLoopOutput | Sequence[AgentLoopOutput]
"""A trajectory; several segments, if it rewrote its history."""


@contextmanager
def trajectory_span(
    attempt: Attempt, place: Place, step: int | None, validate: bool
) -> Iterator[Callable[[Outputs], None]]:
    """Record one attempt at a trajectory; yield a function that takes its outcome."""
    known: dict[str, Any] = {"uid": place.uid, "sample": place.sample, "attempt": attempt.id, "loop": attempt.loop}
    trace = rollout_trace_attr(
        sample_index=place.uid, step=step, rollout_n=place.sample, name="agent_loop", validate=validate
    )
    with (
        timeline.grouped(attempt.id),
        timeline.span(f"trajectory {place.row}", "trajectory", **known) as shown,
        trace,
        rollout_trace_span("trajectory", known) as keep,
    ):

        def ended(given: Outputs) -> None:
            outputs = [given] if isinstance(given, AgentLoopOutput) else list(given)
            last = outputs[-1]
            shown.update(
                outcome="ok",
                tokens=sum(len(each.response_ids) for each in outputs),
                messages=last.num_turns,
                score=last.reward_score,
                **({"segments": len(outputs)} if len(outputs) > 1 else {}),
            )
            keep([_traced(each) for each in outputs] if len(outputs) > 1 else _traced(last))

        yield ended


def _traced(output: AgentLoopOutput) -> JsonObject:
    names = ("prompt_ids", "response_ids", "response_mask", "num_turns", "extra_fields")
    return {name: getattr(output, name) for name in names} | {"score": output.reward_score}


@contextmanager
def activity(name: str, category: str, inputs: Mapping[str, Json], on: str | None = None) -> Iterator[Keep]:
    """Record a part of a trajectory, such as a tool call; yields a function that takes its result.

    Args: ``category`` is ``tool``, ``user`` or ``reward``; ``on`` names who did it, and gets a separate track.
    """
    with timeline.span(name, category, on=on, **inputs) as shown, rollout_trace_span(name, dict(inputs)) as keep:

        def ended(result: Any) -> None:
            keep(result)
            if isinstance(result, Mapping):
                shown.update(result)

        yield ended
