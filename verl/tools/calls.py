"""Run one tool call, and classify its outcome."""

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from verl.base_config import one_line
from verl.errors import WrongInput
from verl.tools.schemas import ToolResponse, decode_arguments
from verl.utils.json_types import Json, JsonObject
from verl.utils.masking import masked_text

if TYPE_CHECKING:
    from verl.tools.base_tool import BaseTool, Executed

T = TypeVar("T")
logger = logging.getLogger(__name__)

OUTCOME = "outcome"
"""The metric by which a tool says how a call ended, where it answers instead of raising ``ToolError``."""
ABORT_TIMEOUT_S = 10.0
_SHOWN_ERROR_CHARS = 500


class ToolOutcome(StrEnum):
    """The outcome of a call."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"


class ToolError(Exception):
    """A call failed. The model reads the text."""

    outcome = ToolOutcome.ERROR


class ToolTimeout(ToolError):
    """A call took too long."""

    outcome = ToolOutcome.TIMEOUT


class ToolMethodError(WrongInput):
    """A method of a tool is no ``async def``."""


class BadArguments(ToolError):
    """The model wrote arguments that the tool cannot use."""

    outcome = ToolOutcome.BAD_ARGUMENTS


@dataclass(frozen=True)
class CallResult:
    """The result of one call: the answer for the model, and the metrics. The reward is None if the tool gave none."""

    response: ToolResponse
    outcome: ToolOutcome
    seconds: float = 0.0
    reward: float | None = None
    metrics: JsonObject = field(default_factory=dict)


def unknown_tool(name: str, known: Iterable[str]) -> CallResult:
    """Return the result of a call of a tool that does not exist."""
    text = f"Error: there is no tool {name!r}; the tools are {', '.join(sorted(known)) or 'none'}."
    return CallResult(ToolResponse(text=text), ToolOutcome.UNKNOWN_TOOL)


async def answer_of(made: Awaitable[T], what: str) -> T:
    """Await a tool method's result; none of its exceptions ends the event loop that all trajectories share.

    Args: ``made`` is what the method returned; ``what`` names tool and method in errors.
    Raises: ToolMethodError for a method that is no ``async def``; ToolError for errors that are no ``Exception``, such
        as exit.
    """
    if not inspect.isawaitable(made):
        raise ToolMethodError(f"{what} returned {type(made).__name__} at once: write it as async def")
    try:
        return await made
    except SystemExit as error:
        raise ToolError(f"the tool has called exit({error.code!r}).") from error
    except BaseException as error:  # KeyboardInterrupt, or a panic of Rust code; the others are passed on unchanged
        if isinstance(error, Exception | asyncio.CancelledError):
            raise
        raise ToolError(f"{type(error).__name__}: {error}") from error


async def execute_call(
    tool: "BaseTool",
    instance_id: str,
    arguments: str | JsonObject,
    timeout_s: float | None = None,
    **execute_kwargs: Json,
) -> CallResult:
    """Run one call; whatever goes wrong in the tool becomes a text for the model and an outcome.

    Args:
        arguments: as the model wrote them, JSON or already decoded.
        timeout_s: seconds that the call may take; then the tool's ``abort`` cancels its external work.
        execute_kwargs: further arguments of ``execute``, which the row gives for this tool.

    Raises: CancelledError, after the tool's ``abort``; ToolMethodError for a tool whose methods are no ``async def``.
    """
    start = time.monotonic()

    def ended(outcome: ToolOutcome, text: str) -> CallResult:
        return CallResult(ToolResponse(text=f"Error: {masked_text(text)}"), outcome, time.monotonic() - start)

    parameters = decode_arguments(arguments) if isinstance(arguments, str) else arguments
    if parameters is None:
        return ended(ToolOutcome.BAD_ARGUMENTS, "the arguments are no JSON object.")

    async def run() -> "Executed":
        return await answer_of(tool.execute(instance_id, parameters, **execute_kwargs), f"execute of {tool.name}")

    call = asyncio.ensure_future(run())
    try:
        done, _ = await asyncio.wait([call], timeout=timeout_s)
    except asyncio.CancelledError:
        await _abort(tool, instance_id, call)
        raise
    if not done:
        await _abort(tool, instance_id, call)
        return ended(ToolOutcome.TIMEOUT, f"the tool did not answer within {timeout_s:g} s.")
    if call.cancelled():  # the tool cancelled the call: nobody cancelled the trajectory
        return ended(ToolOutcome.ERROR, "the tool cancelled the call.")
    try:
        given = call.result()
        if not isinstance(given, tuple | list) or len(given) != 3:
            raise TypeError(f"execute returned {type(given).__name__}, not (ToolResponse, reward, metrics)")
        response, reward, metrics = given
        metrics = metrics or {}  # tools of the established verl interface may return None
        if not isinstance(metrics, Mapping):
            raise TypeError(f"execute returned {type(metrics).__name__} as its metrics, not a mapping")
        outcome = ToolOutcome(str(metrics.get(OUTCOME, ToolOutcome.OK)))
        if not isinstance(response, ToolResponse):
            raise TypeError(f"execute returned {type(response).__name__} as its answer, not ToolResponse")
        reward = None if reward is None else float(reward)
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"execute returned the reward {reward}, not a finite number")
    except ToolError as error:
        return ended(error.outcome, str(error))
    except ToolMethodError:
        raise
    except Exception as error:  # a tool may raise anything; its trajectory goes on
        _log_once(tool, error)
        return ended(ToolOutcome.ERROR, one_line(f"{type(error).__name__}: {error}", _SHOWN_ERROR_CHARS))
    return CallResult(response, outcome, time.monotonic() - start, reward, dict(metrics))


_logged: set[tuple[str, type[BaseException]]] = set()


def _log_once(tool: "BaseTool", error: Exception) -> None:
    """Log the first error of a kind that a tool did not mean for the model: it may be a mistake in its code."""
    kind = (tool.name, type(error))
    if kind in _logged:
        return
    _logged.add(kind)
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.warning(
        "tool %s: %s: %s (%s, line %d): the model reads this; further errors of this kind are only counted, in "
        "tool_calls/failed",
        *(tool.name, type(error).__name__, one_line(str(error), _SHOWN_ERROR_CHARS), place.filename, place.lineno or 0),
    )


async def _abort(tool: "BaseTool", instance_id: str, call: "asyncio.Future[Executed]") -> None:
    """Cancel a call and its external work; give up on a tool that does not end it in time."""
    call.cancel()
    with suppress(Exception):
        await asyncio.wait_for(answer_of(tool.abort(instance_id), f"abort of {tool.name}"), ABORT_TIMEOUT_S)
    with suppress(Exception):
        await asyncio.wait([call], timeout=ABORT_TIMEOUT_S)
    if call.done() and not call.cancelled():
        call.exception()  # marks the exception as retrieved, else asyncio would log it
