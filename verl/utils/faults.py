"""Inject faults, so that tests can prove how a run reacts when a process dies or hangs.

``VERL_FAULT`` holds ``action:point[:key=value]...``, such as ``kill:update_actor:rank=1:step=2``. Actions are ``kill``
(SIGKILL), ``hang`` (SIGSTOP), ``term`` (SIGTERM) and ``crash`` (SIGSEGV) to a process, ``raise`` (an exception),
``slow`` (half a second of sleep) and, for ``weight_sync`` only, ``skip`` (on all ranks). A fault fires once, except
``slow``, which fires each time. Before it fires it writes the time to ``VERL_FAULT_FILE``, as proof that the run
entered the phase.

A worker has its own points, and ``before_<method>`` for each registered method. The trainer has
``trainer_<phase>``. The signal goes to the process at the point, or to the one that ``on=`` names: ``raylet``, ``gcs``,
``launch``, the process that started the raylet, or a process of an SGLang engine: ``scheduler``, ``detokenizer`` or
``owner``, the actor that has started the engine. The process at the point waits for the end that the first three bring,
and goes on after the others.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from verl.utils import envs

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "term": signal.SIGTERM, "crash": signal.SIGSEGV}
ACTIONS = (*SIGNALS, "raise", "slow", "skip")
OF_ENGINES = ("scheduler", "detokenizer", "owner")
TARGETS = ("raylet", "gcs", "launch", *OF_ENGINES)
SLOW_S = 0.5
_SEARCH_S = 120.0  # a standalone server may be starting its engine again
SKIPPABLE = ("weight_sync",)


@dataclass(frozen=True)
class Fault:
    """One fault: its action, the named point where it fires, its rank and step (None for any), and its target."""

    action: str
    point: str
    rank: int | None = None
    step: int | None = None
    on: str | None = None


class InjectedFault(RuntimeError):
    """The exception of the ``raise`` action."""


@cache
def parse_fault(text: str) -> Fault:
    """Parse the value of ``VERL_FAULT``.

    Raises: ValueError for a malformed value.
    """
    action, *rest = text.split(":")
    if action not in ACTIONS or not rest:
        form = "action:point[:rank=N][:step=N][:on=TARGET]"
        raise ValueError(f"VERL_FAULT={text!r} must be {form} with an action of {ACTIONS}")
    options: dict[str, int] = {}
    target = None
    for part in rest[1:]:
        key, _, value = part.partition("=")
        if key == "on" and value in TARGETS and action in SIGNALS:
            target = value
            continue
        if key not in ("rank", "step") or not value.lstrip("-").isdigit():
            raise ValueError(
                f"VERL_FAULT={text!r}: {part!r} must be rank=N, step=N, or on={'|'.join(TARGETS)} with a signal"
            )
        options[key] = int(value)
    if action == "skip" and (rest[0] not in SKIPPABLE or "rank" in options):
        raise ValueError(f"VERL_FAULT={text!r}: skip works for {', '.join(SKIPPABLE)} and on all ranks only; omit rank")
    return Fault(action, rest[0], **options, on=target)


def fault_point(point: str, *, rank: int, step: int | None = None) -> None:
    """Fire the configured fault if it matches this point, rank and step."""
    fault = _take(point, rank, step, skip=False)
    if fault is None:
        return
    if fault.action == "raise":
        raise InjectedFault(f"injected at {point}, rank {rank}, step {step}")
    if fault.action == "slow":
        time.sleep(SLOW_S)
        return
    os.kill(_pid_of(fault.on), SIGNALS[fault.action])
    while fault.on is not None and fault.on not in OF_ENGINES:
        time.sleep(1)


def _pid_of(target: str | None) -> int:
    """Return the process that a fault hits; None means this one."""
    if target is None:
        return os.getpid()
    if target in OF_ENGINES:
        return _process_of_engine(target).pid
    raylet = psutil.Process(envs.integer("RAY_RAYLET_PID", 0))
    if target == "raylet":
        return raylet.pid
    launch = raylet.parent()
    assert launch is not None
    if target == "launch":
        return launch.pid
    return next(child.pid for child in launch.children() if child.name() == "gcs_server")


def _process_of_engine(target: str) -> psutil.Process:
    """Return a process of the first SGLang engine of this node and run, which has the raylet of this process."""
    here = envs.integer("RAY_RAYLET_PID", 0)
    title = "sglang::detokenizer" if target == "detokenizer" else "sglang::scheduler"
    found: list[psutil.Process] = []
    deadline = time.monotonic() + _SEARCH_S
    while not found and time.monotonic() < deadline:
        for each in psutil.process_iter():
            with suppress(psutil.Error):  # the process has ended, or belongs to another user
                if _title(each).startswith(title) and _is_below(each, here):
                    found.append(each)
        time.sleep(0 if found else 0.1)
    if not found:
        raise RuntimeError(f"VERL_FAULT: this run has no process {title}")
    process = min(found, key=lambda each: each.pid)
    if target == "owner":
        return next(each for each in process.parents() if _title(each).startswith("ray::"))
    return process


def _is_below(process: psutil.Process, raylet: int) -> bool:
    """Return whether a process, or one that it comes from, belongs to a raylet.

    A process that sets its title, as SGLang's do, may overwrite its environment with it.
    """
    lineage = [process, *process.parents()]
    return any(each.pid == raylet or each.environ().get("RAY_RAYLET_PID") == str(raylet) for each in lineage)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def is_skipped(point: str, *, rank: int, step: int | None = None) -> bool:
    """Return whether the configured fault skips this point now; it does so once."""
    return _take(point, rank, step, skip=True) is not None


def _take(point: str, rank: int, step: int | None, skip: bool) -> Fault | None:
    """Return the fault that matches this point, after recording and clearing it."""
    text = envs.read("VERL_FAULT")
    if not text:
        return None
    fault = parse_fault(text)
    matches = fault.point == point and fault.rank in (None, rank) and fault.step in (None, step)
    if not matches or (fault.action == "skip") != skip:
        return None
    if fault.action != "slow":
        envs.remove("VERL_FAULT")
    record = envs.read("VERL_FAULT_FILE")
    if record:
        Path(record).write_text(f"{time.time()} {point} rank={rank} step={step}", encoding="utf-8")
    return fault
