"""What a batch does about slow and failed trajectories, and the account of it."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout import tiny
from verl.errors import RequestTimeoutError, WrongInput
from verl.experimental.agent_loop import AgentLoopOutput, batch
from verl.experimental.agent_loop.attempts import (
    Attempt,
    TrajectoryError,
    TrajectoryInputError,
    attempt_metrics,
    mark_replaced,
)
from verl.experimental.agent_loop.batch import BatchOfAttempts, Place, Policy, Task, places_of
from verl.experimental.agent_loop.manager import _account_of
from verl.experimental.agent_loop.rows import check_output, joined, rows_of
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.utils.observe.attempts import AttemptsRecord, read_attempts

Run = Callable[[Attempt], Awaitable[AgentLoopOutput]]


def output_of(*tokens: int) -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=[5], response_ids=list(tokens), response_mask=[1] * len(tokens))


def tasks_of(*runs: Run) -> list[Task]:
    """Two samples of each prompt."""
    return [Task(Place(row, f"p{row // 2}", row % 2), "loop", 100 + row, run) for row, run in enumerate(runs)]


async def good(attempt: Attempt) -> AgentLoopOutput:
    await asyncio.sleep(0)
    return output_of(7)


async def hangs(attempt: Attempt) -> AgentLoopOutput:
    await asyncio.sleep(3600)
    raise AssertionError("nobody has ended this attempt")


def fails(times: int, error: Exception | None = None) -> Run:
    async def run(attempt: Attempt) -> AgentLoopOutput:
        await asyncio.sleep(0)
        if int(attempt.id.rpartition("-")[2]) < times:
            raise error or RuntimeError("the sandbox is full")
        return output_of(8)

    return run


def outcomes(batch: BatchOfAttempts) -> list[tuple[str, str | None]]:
    return [(attempt.id, attempt.outcome) for attempt in batch.attempts]


def run(policy: Policy, *runs: Run) -> tuple[list[AgentLoopOutput | None], BatchOfAttempts]:
    async def all_of_it() -> tuple[list[AgentLoopOutput | None], BatchOfAttempts]:
        batch = BatchOfAttempts(tasks_of(*runs), policy, step=3)
        return await batch.results(), batch

    return asyncio.run(all_of_it())


def test_a_failure_ends_the_run_by_name() -> None:
    """The message names row, loop and attempt; the others are cancelled, and all are in the account."""
    with pytest.raises(
        TrajectoryError, match=r"row 1 \(uid p0, sample 1\): agent loop loop failed in attempt"
    ) as error:
        run(Policy(), hangs, fails(9), hangs)
    assert "3-train-p0-1-0: RuntimeError: the sandbox is full" in str(error.value)
    kept = pickle.loads(pickle.dumps(error.value))  # Ray pickles it
    lines = {line["id"]: line for line in kept.attempts}
    assert lines["3-train-p0-1-0"]["outcome"] == "error"
    assert lines["3-train-p0-0-0"]["outcome"] == lines["3-train-p1-0-0"]["outcome"] == "cancelled"
    assert "the run ends: row 1" in lines["3-train-p1-0-0"]["reason"]
    with pytest.raises(TrajectoryInputError, match="max_model_len") as wrong:
        run(Policy(), fails(9, WrongInput("raise max_model_len")))
    assert isinstance(wrong.value, WrongInput)


def test_a_failed_trajectory_is_tried_again() -> None:
    outputs, batch = run(Policy("retry", 2), good, fails(2))
    assert [output and output.response_ids for output in outputs] == [[7], [8]]
    assert sorted(outcomes(batch)) == [
        ("3-train-p0-0-0", "ok"),
        ("3-train-p0-1-0", "error"),
        ("3-train-p0-1-1", "error"),
        ("3-train-p0-1-2", "ok"),
    ]
    assert [attempt.seed for attempt in batch.attempts if attempt.sample == 1] == [101] * 3
    metrics = attempt_metrics(attempt.line() for attempt in batch.attempts)
    assert metrics["attempts/started"] == 4 and metrics["attempts/retried"] == metrics["attempts/failed"] == 2
    with pytest.raises(TrajectoryError, match="3-train-p0-0-1: RuntimeError: the sandbox is full"):
        run(Policy("retry", 1), fails(2))


def test_a_group_goes_on_without_a_failed_sample_or_is_replaced() -> None:
    outputs, batch = run(Policy("drop", 1), good, fails(9), good, good)
    assert [output is None for output in outputs] == [False, True, False, False]
    assert sorted(outcomes(batch))[1:3] == [("3-train-p0-1-0", "error"), ("3-train-p0-1-1", "dropped")]
    dropped = next(attempt for attempt in batch.attempts if attempt.outcome == "dropped")
    assert dropped.reason == "error: RuntimeError: the sandbox is full"
    outputs, batch = run(Policy("replace", 0), good, fails(9), good, good)
    assert outputs[1] is None
    lines = [attempt.line() for attempt in batch.attempts]
    mark_replaced(lines, ["p0"])
    assert [line["outcome"] for line in lines] == ["replaced", "replaced", "ok", "ok"]
    metrics = attempt_metrics(lines)
    assert metrics["attempts/replaced"] == 2 and metrics["attempts/failed"] == 1


def test_a_loop_that_cancels_itself_or_exits_has_failed() -> None:
    """Nobody has told these to end: they must neither hang the batch nor end the process."""

    async def cancels(attempt: Attempt) -> AgentLoopOutput:
        inner = asyncio.ensure_future(asyncio.sleep(3600))
        inner.cancel()
        await inner
        raise AssertionError("the await above raises")

    async def exits(attempt: Attempt) -> AgentLoopOutput:
        raise SystemExit(3)

    results, batch = run(Policy("drop", step_timeout_s=3000), cancels, exits, good)
    assert [result is None for result in results] == [True, True, False]
    assert [attempt.outcome for attempt in batch.attempts] == ["dropped", "dropped", "ok"]
    assert [attempt.reason for attempt in batch.attempts] == ["error: CancelledError: ", "error: SystemExit: 3", None]
    with pytest.raises(TrajectoryError, match=r"row 0 .* CancelledError"):
        run(Policy("fail", step_timeout_s=3000), cancels, hangs)


class Panic(BaseException):
    """As tokenizers and other Rust code raise it: no Exception."""


class Textless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Panic("at index 3"), "Panic: at index 3"),
        (Textless(), "Textless, which has no text: RuntimeError in its __str__"),
        (KeyboardInterrupt(), "Interrupt"),
    ],
)
def test_an_error_of_any_kind_ends_its_batch_by_name(error: BaseException, message: str) -> None:
    """And at once: nobody may wait for the deadline of the step."""

    async def raises(attempt: Attempt) -> AgentLoopOutput:
        raise error

    with pytest.raises(TrajectoryError, match=rf"row 0 \(uid p0, sample 0\): agent loop loop .*{message}") as found:
        run(Policy("fail", step_timeout_s=3000), raises, hangs)
    lines = {line["id"]: line["outcome"] for line in found.value.attempts}
    assert lines == {"3-train-p0-0-0": "error", "3-train-p0-1-0": "cancelled"}


def test_deadlines() -> None:
    """Of an attempt, which may be tried again, and of the whole batch, which may not."""
    outputs, batch = run(Policy("drop", 1, trajectory_timeout_s=0.05), good, hangs)
    assert outputs[1] is None
    lines = [attempt.line() for attempt in batch.attempts if attempt.sample == 1]
    assert [line["outcome"] for line in lines] == ["timeout", "dropped"]
    assert lines[1]["reason"] == "timeout: rollout.agent.trajectory_timeout_s=0.05 is over"
    assert lines[0]["end"] - lines[0]["start"] > 0.04
    outputs, batch = run(Policy("drop", 1, step_timeout_s=0.05), good, hangs)
    assert outputs[0] is not None and outputs[1] is None
    assert [attempt.outcome for attempt in batch.attempts] == ["ok", "dropped"]
    with pytest.raises(
        TrajectoryError, match="3-train-p0-1-0: DeadlineError: rollout.agent.step_timeout_s=0.05 is over"
    ):
        run(Policy("retry", 1, step_timeout_s=0.05), good, hangs)
    with pytest.raises(TrajectoryError, match="RequestTimeoutError") as error:
        run(Policy(), fails(1, RequestTimeoutError("server 3 has not answered")))
    assert error.value.attempts[0]["outcome"] == "timeout"


def test_a_loop_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch ends at its deadlines all the same, names the loop, and gives it no more tokens."""
    monkeypatch.setattr(batch, "END_S", 0.05)
    refused: list[str] = []

    async def stays(attempt: Attempt) -> AgentLoopOutput:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            with pytest.raises(RuntimeError) as error:
                attempt.next_turn({})
            refused.append(str(error.value))
        await asyncio.sleep(3600)  # until the end of the event loop, which cancels it again
        raise AssertionError("nobody has ended this attempt")

    async def late(attempt: Attempt) -> AgentLoopOutput:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return output_of(9)  # of which nobody knows whether it is whole

    left = "agent loop loop goes on although it was cancelled, and is left behind"
    for policy, key in (
        (Policy("drop", 0, step_timeout_s=0.05), "step"),
        (Policy("drop", 0, trajectory_timeout_s=0.05), "trajectory"),
    ):
        outputs, attempts = run(policy, good, stays, late)
        assert [output is None for output in outputs] == [False, True, True]
        reason = f"timeout: rollout.agent.{key}_timeout_s=0.05 is over"
        assert [attempt.reason for attempt in attempts.attempts] == [None, f"{reason}; {left}", reason]
    with pytest.raises(TrajectoryError, match=f"row 0 .* DeadlineError: rollout.agent.step_timeout_s=0.05 .*{left}"):
        run(Policy("retry", 3, step_timeout_s=0.05), stays)
    assert set(refused) == {
        "attempt 3-train-p0-1-0 has ended: agent loop loop must not ask for more tokens",
        "attempt 3-train-p0-0-0 has ended: agent loop loop must not ask for more tokens",
    }


def test_over_sampling_gives_up_the_last_ones() -> None:
    outputs, batch = run(Policy(over_sample_rate=0.3), hangs, *[good] * 8, hangs)  # 7 of 10 are enough
    given_up = [row for row, output in enumerate(outputs) if output is None]
    assert {0, 9} <= set(given_up) and len(given_up) <= 3
    reasons = {attempt.reason for attempt in batch.attempts if attempt.outcome == "cancelled"}
    assert len(reasons) == 1 and "rollout.over_sample_rate=0.3" in str(reasons)
    everything, _ = run(Policy(), *[good] * 4)
    assert None not in everything


def test_validation_and_baselines_cannot_lose_rows() -> None:
    class Rollout:
        over_sample_rate = 0.2
        agent = SimpleNamespace(on_failure="replace", num_retries=2, trajectory_timeout_s=1, step_timeout_s=None)

    assert Policy.of(Rollout, {}, False) == Policy("replace", 2, 1, None, 0.2)
    assert Policy.of(Rollout, {"validate": True}, True) == Policy("drop", 2, 1)
    assert Policy.of(Rollout, {}, True) == Policy("retry", 2, 1)


def test_rows_without_a_trajectory() -> None:
    asked = tiny.prompts_batch(2, repeat=2)
    asked.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    assert places_of(asked) == [Place(0, "a", 0), Place(1, "a", 1), Place(2, "b", 0), Place(3, "b", 1)]
    prompts = [list(row) for row in asked.non_tensor_batch["raw_prompt_ids"]]
    whole = [output_of(7), output_of(8), None, output_of(9, 9)]
    for output, prompt in zip(whole, prompts, strict=True):
        if output is not None:
            output.prompt_ids, output.reward_score, output.extra_fields = prompt, 1.0, {"seen": 1}
            output.response_logprobs = [-0.5] * len(output.response_ids)
    parts = [rows_of(whole[:2], asked[:2], 4, 0), rows_of(whole[2:3], asked[2:3], 4, 0)]
    assert "__dropped__" not in parts[0].non_tensor_batch
    parts.append(rows_of(whole[3:], asked[3:], 4, 0))
    found = joined(parts)
    assert found.non_tensor_batch["__dropped__"].tolist() == [False, False, True, False]
    assert found.non_tensor_batch["seen"].tolist() == [1, 1, None, 1]
    assert found.batch["response_mask"].sum(-1).tolist() == [1, 1, 0, 2]
    assert found.batch["rm_scores"].sum(-1).tolist() == [1, 1, 0, 1]
    assert found.batch["rollout_log_probs"][3].tolist() == [-0.5, -0.5, 0, 0]
    assert torch.equal(found.batch["prompts"], asked.batch["input_ids"])  # the row still has its prompt


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": []}, "its prompt is empty"),
        ({"response_ids": [-1]}, "response_ids has the token -1"),
        ({"response_ids": [9]}, "response_ids has the token 9; the model's are 0 to 8"),
        ({"prompt_ids": [1, 99]}, "prompt_ids has the token 99"),
        ({"extra_fields": {"responses": 1}}, "extra_fields has 'responses', a column of the batch"),
        ({"extra_fields": {"__dropped__": True}}, "extra_fields has '__dropped__'"),
    ],
)
def test_an_output_that_training_would_read_wrongly_is_refused(wrong: dict[str, Any], message: str) -> None:
    segments = output_of(7).model_copy(update={"earlier": [output_of(8).model_copy(update=wrong)]})
    for output in (output_of(7).model_copy(update=wrong), segments):
        with pytest.raises(ValueError, match=f"trajectory 5: {message}"):
            check_output(5, output, 4, vocab_size=9)
    check_output(5, output_of(8).model_copy(update={"extra_fields": {TURNS_COLUMN: [], "seen": 1}}), 4, vocab_size=9)


@pytest.mark.parametrize(
    "wrong", [{"response_mask": [2]}, {"response_logprobs": [float("nan")]}, {"reward_score": float("inf")}]
)
def test_numbers_that_would_spoil_an_update_are_refused(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"trajectory 0: {next(iter(wrong))}"):
        rows_of([output_of(7).model_copy(update=wrong)], tiny.prompts_batch(1), 4, 0)
    whole = output_of(7).model_copy(update={"reward_score": 1.0, "response_logprobs": [-0.5]})
    with caplog.at_level("WARNING"):
        found = rows_of([whole, output_of(7), None], tiny.prompts_batch(3), 4, 0)
    assert not {"rm_scores", "rollout_log_probs"} & set(found.batch.keys())
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "1 of 2 trajectories have no response_logprobs", "1 of 2 trajectories have no reward_score",
    ]  # fmt: skip
    caplog.clear()
    parts = [rows_of([output], tiny.prompts_batch(1), 4, 0) for output in (whole, output_of(7), None)]
    assert caplog.records == []  # each worker sees its part only
    assert not {"rm_scores", "rollout_log_probs"} & set(joined(parts).batch.keys())
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "1 of 2 trajectories have no response_logprobs", "1 of 2 trajectories have no reward_score",
    ]  # fmt: skip
    masked = output_of(7).model_copy(update={"response_mask": [0], "response_logprobs": [float("nan")]})
    assert len(rows_of([masked], tiny.prompts_batch(1), 4, 0)) == 1


def test_the_account_outlives_a_resume(tmp_path: Any) -> None:
    record = AttemptsRecord(tmp_path, None)
    assert not record.path.exists() and list(read_attempts(tmp_path)) == []
    for step in (1, 2, 3):
        attempt = Attempt(f"{step}-train-u-0-0", "u", 0, "loop", start=5.0)
        attempt.finish("error", "x\ny")
        record.log(step, [attempt.line()])
    with record.path.open("a") as file:
        file.write('{"step": 3, "id": "cut')
    resumed = AttemptsRecord(tmp_path, 2)
    assert [(line["step"], line["reason"]) for line in read_attempts(tmp_path)] == [(1, "x\ny"), (2, "x\ny")]
    resumed.log(3, [])
    assert len(list(read_attempts(tmp_path))) == 2
    AttemptsRecord(tmp_path, None)
    assert (tmp_path / "attempts.previous.jsonl").exists() and not record.path.exists()


def test_the_account_of_a_batch_that_ended_the_run() -> None:
    """That of the worker which failed, as Ray hands it on, and a line for each row of the others."""
    asked = tiny.prompts_batch(3)
    known = Attempt("3-train-row0-0-0", "row0", 0, "loop")
    known.finish("error", "OSError: full")

    class FromRay(Exception):
        cause = TrajectoryError("row 0 failed", [known.line()])

    error = RuntimeError("worker rank 0 raised an exception\nin the worker")
    error.__cause__ = FromRay()
    lines = _account_of(asked, error)
    assert [(line["uid"], line["outcome"]) for line in lines] == [
        ("row0", "error"),
        ("row1", "cancelled"),
        ("row2", "cancelled"),
    ]
    assert lines[1]["reason"] == "the run ends: RuntimeError: worker rank 0 raised an exception"
