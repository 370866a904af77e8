"""Environments of the package verifiers, where it is installed (``pip install 'verifiers<0.2'``)."""

import asyncio
import importlib.util
from typing import Any

import pytest

from verl.base_config import WrongInput
from verl.interactions.verifiers_interaction import VerifiersInteraction

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed")


def guessing(**kwargs: Any) -> Any:
    """An environment in which a number is guessed."""
    import verifiers as vf
    from datasets import Dataset

    class Guessing(vf.MultiTurnEnv):
        async def setup_state(self, state: Any) -> None:
            state["number"] = int(state["answer"])

        @vf.stop
        async def guessed(self, state: Any) -> bool:
            last = state["trajectory"][-1]["completion"][-1].content if state["trajectory"] else ""
            return last == str(state["number"])

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            text = messages[-1].content
            if text == "crash":
                raise vf.Error("the dice broke")
            return [{"role": "user", "content": "Larger." if int(text) < state["number"] else "Smaller."}]

    def turns(state: Any, **kwargs: Any) -> float:
        return float(len(state["trajectory"]))

    def right(completion: Any, answer: str, **kwargs: Any) -> float:
        return float(completion[-1].content == answer)

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"}])
    return Guessing(dataset=data, rubric=vf.Rubric(funcs=[right, turns], weights=[1.0, -0.1]), max_turns=3, **kwargs)


def play(replies: list[str], given: Any = None) -> list[Any]:
    async def run() -> list[Any]:
        interaction = VerifiersInteraction({"name": "guess", "factory": f"{__name__}.guessing"})
        row = {"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"} if given is None else given
        name = await interaction.start_interaction(input=row)
        messages: list[dict[str, Any]] = list(row["prompt"])
        turns: list[Any] = []
        for reply in replies:
            messages.append({"role": "assistant", "content": reply})
            turns.append(await interaction.generate_response(name, messages))
            messages.append({"role": "user", "content": turns[-1][1]})
        turns.append(await interaction.calculate_score(name))
        await interaction.finalize_interaction(name)
        return turns

    return asyncio.run(run())


@needs_verifiers
def test_the_environment_answers_and_its_rubric_scores() -> None:
    turns = play(["3", "9", "7"])
    assert turns[0] == (False, "Larger.", 0.0, {})
    assert turns[1] == (False, "Smaller.", 0.0, {})
    assert turns[2][0] is True and turns[2][2] == pytest.approx(1.0 - 0.3)
    assert turns[2][3]["right"] == 1.0 and turns[2][3]["turns"] == 3.0
    assert turns[3] == pytest.approx(0.7)


@needs_verifiers
def test_the_environment_ends_after_its_turns() -> None:
    turns = play(["1", "2", "3", "4"])
    assert [turn[0] for turn in turns[:4]] == [False, False, True, True]
    assert turns[2][2] == pytest.approx(-0.3)


@needs_verifiers
def test_an_unfinished_rollout_is_ended() -> None:
    assert play(["1"])[0][0] is False


@needs_verifiers
@pytest.mark.parametrize("given", [{}, {"answer": "7"}])
def test_a_row_without_input_is_refused(given: Any) -> None:
    with pytest.raises(WrongInput, match=r"interaction_kwargs\.input"):
        play([], given)


@needs_verifiers
def test_a_failing_environment_is_named() -> None:
    with pytest.raises(RuntimeError, match="interaction guess: .*the dice broke"):
        play(["crash"])


@pytest.mark.parametrize("config", [{}, {"environment": "a", "factory": "b.c"}])
def test_one_environment_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(WrongInput, match="write either environment"):
        VerifiersInteraction(config)


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(WrongInput, match="verifiers is not installed: pip install"):
        VerifiersInteraction({"environment": "a"})
