"""Interactions: their files, the built-in ones, a user played by a server, and environments."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.http_service import service
from verl.errors import WrongInput
from verl.interactions.base import BaseInteraction, last_text
from verl.interactions.environment_interaction import EnvironmentInteraction, reset_text
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.interactions.simulated_user_interaction import SimulatedUserInteraction
from verl.interactions.utils.interaction_registry import get_interaction_class, initialize_interactions_from_config
from verl.interactions.weather_interaction import WeatherInteraction
from verl.utils.chat_endpoint import EndpointError

GSM8K = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# ---- files


def write(folder: Path, items: Any) -> str:
    path = folder / "interactions.yaml"
    path.write_text(yaml.safe_dump({"interaction": items}))
    return str(path)


def test_interactions_are_made_by_name(tmp_path: Path) -> None:
    weather = {"class_name": "verl.interactions.weather_interaction.WeatherInteraction", "config": {"a": 1}}
    found = initialize_interactions_from_config(
        write(tmp_path, [{"name": "math", "class_name": GSM8K, "config": {}}, {"class_name": GSM8K}, weather])
    )
    assert {name: (type(each), each.name) for name, each in found.items()} == {
        "math": (Gsm8kInteraction, "math"),
        "gsm8k": (Gsm8kInteraction, "gsm8k"),
        "weather": (WeatherInteraction, "weather"),
    }
    assert found["weather"].config == {"a": 1, "name": "weather"}
    assert Gsm8kInteraction({}).name == "interaction_agent"


def test_a_subclass_reads_the_state_of_each_instance() -> None:
    """As forks write it: the class by its name, and a score of their own from what the instance keeps."""

    class Lenient(get_interaction_class(GSM8K)):  # type: ignore[misc]
        async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
            kept = self._instance_dict[instance_id]
            return 0.5 if kept["ground_truth"] in kept["response"] else 0.0

    async def talk() -> list[Any]:
        interaction = Lenient({})
        first = await interaction.start_interaction(ground_truth=42)
        second = await interaction.start_interaction(ground_truth="7")
        answered = await interaction.generate_response(first, [user("6 x 7?"), assistant("It is 42.")])
        kept = dict(interaction._instance_dict)
        await interaction.finalize_interaction(first)
        return [answered[2], kept[first], kept[second], list(interaction._instance_dict) == [second]]

    score, first, second, has_forgotten = asyncio.run(talk())
    assert score == 0.5 and has_forgotten
    assert first == {"ground_truth": "42", "response": "It is 42.", "reward": 0.5}
    assert second == {"ground_truth": "7", "response": "", "reward": 0.0}


@pytest.mark.parametrize("name", ["verl.tools.gsm8k_tool.Gsm8kTool", "verl.no_module.It", "It"])
def test_a_name_that_is_no_interaction_is_refused(name: str) -> None:
    with pytest.raises(WrongInput, match=name.rpartition(".")[2]):
        get_interaction_class(name)


@pytest.mark.parametrize(
    ("items", "parts"),
    [
        ([], ["no list under 'interaction'"]),
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], ["interaction[1]", "Duplicate interaction name 'gsm8k'"]),
        ([{"class_name": GSM8K, "name": ""}], ["interaction[0].name=''", "interaction_kwargs.name"]),
        ([{"class_name": GSM8K, "confg": {}}], ["interaction[0]", "'confg' is unknown", "write config"]),
        ([{"class_name": "verl.tools.base_tool.BaseTool"}], ["is no subclass of verl.interactions.base.BaseInter"]),
        (
            [{"class_name": "verl.interactions.simulated_user_interaction.SimulatedUserInteraction"}],
            ["interaction[0]", "config.base_url="],
        ),
    ],
)
def test_a_wrong_file_is_refused_by_place(items: Any, parts: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, items)
    with pytest.raises(WrongInput) as caught:
        initialize_interactions_from_config(path)
    for part in (path, *parts):
        assert part in str(caught.value)


# ---- built-in


def test_messages_may_have_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert last_text([assistant("x"), {"role": "assistant", "content": parts}, user("y")], "assistant") == "ab"
    assert last_text([user("y")], "assistant") is None


def test_gsm8k_ends_at_the_right_answer() -> None:
    interaction = Gsm8kInteraction({"name": "gsm8k"})

    async def run() -> list[Any]:
        name = await interaction.start_interaction("i", ground_truth="72", query="how many?", name="gsm8k")
        wrong = await interaction.generate_response(name, [user("how many?"), assistant("#### 71")])
        right = await interaction.generate_response(name, [user("how many?"), assistant("#### 72"), user("sure?")])
        score = await interaction.calculate_score(name)
        await interaction.finalize_interaction(name)
        with pytest.raises(KeyError):
            await interaction.calculate_score(name)
        with pytest.raises(WrongInput, match=r"extra_info\.interaction_kwargs\.ground_truth"):
            await interaction.start_interaction()
        return [name, wrong[0], wrong[2], right[0], right[2], score]

    assert asyncio.run(run()) == ["i", False, 0.0, True, 1.0, 1.0]


def test_weather_wants_a_tool() -> None:
    interaction = WeatherInteraction({})

    async def run(messages: list[dict[str, Any]]) -> tuple[bool, float]:
        name = await interaction.start_interaction()
        ended, _, score, _ = await interaction.generate_response(name, messages)
        assert await interaction.calculate_score(name) == score
        return ended, score

    called = [user("weather?"), assistant(""), {"role": "tool", "content": "sunny"}, assistant("Sunny.")]
    assert asyncio.run(run(called)) == (True, 1.0)
    assert asyncio.run(run([user("weather?"), assistant("Sunny.")])) == (True, 0.0)


# ---- a user played by a second model


def chat_reply(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_simulated_user_sees_the_conversation_from_its_side() -> None:
    answers = ["And in {winter}?", "Thanks. [[TERMINATE CHAT]] bye"]
    failures = [503]

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        return (failures.pop(), {}) if failures else chat_reply(answers[len(request["messages"]) // 2 - 1])

    async def run(url: str) -> list[Any]:
        config = {"base_url": f"{url}/v1", "model": "m", "api_key": "k", "retry_delay_s": 0.01, "max_tokens": 9}
        interaction = SimulatedUserInteraction(config)
        name = await interaction.start_interaction(goal="know the {weather}")
        messages = [{"role": "system", "content": "Help."}, user("Weather?"), assistant("")]
        messages += [{"role": "tool", "content": "sunny"}, assistant("Sunny.")]
        first = await interaction.generate_response(name, messages)
        second = await interaction.generate_response(name, [*messages, user(first[1]), assistant("Cold.")])
        return [first[:2], second[:2]]

    with service(answer) as served:
        assert asyncio.run(run(served.url)) == [(False, "And in {winter}?"), (True, "Thanks.")]
    assert len(served.requests) == 3
    request = served.requests[1]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 9)
    assert served.headers[1]["Authorization"] == "Bearer k" and served.paths[1] == "/v1/chat/completions"
    system, *rest = request["messages"]
    assert system["role"] == "system" and "know the {weather}" in system["content"]
    assert "[[TERMINATE CHAT]]" in system["content"]
    assert rest == [assistant("Weather?"), user("Sunny.")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [((503, {}), "no answer in 2 attempts"), ((404, {}), "HTTP 404"), (chat_reply("  "), "empty message")],
)
def test_a_user_that_gives_no_answer_fails_the_trajectory(answer: tuple[int, Any], message: str) -> None:
    async def run(url: str) -> None:
        config = {"base_url": url, "model": "m", "retry_delay_s": 0.01, "max_attempts": 2, "timeout_s": 5}
        interaction = SimulatedUserInteraction(config)
        name = await interaction.start_interaction(goal="g")
        await interaction.generate_response(name, [user("a"), assistant("b")])

    with service(lambda request: answer) as served, pytest.raises(EndpointError, match=message):
        asyncio.run(run(served.url))


def test_a_simulated_user_stops_after_its_turns() -> None:
    async def run(url: str) -> list[bool]:
        interaction = SimulatedUserInteraction({"base_url": url, "model": "m", "max_user_turns": 2})
        name = await interaction.start_interaction(goal="g")
        return [(await interaction.generate_response(name, [assistant("b")]))[0] for _ in range(3)]

    with service(lambda request: chat_reply("more")) as served:
        assert asyncio.run(run(served.url)) == [False, False, True]
    assert len(served.requests) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"base_url": "http://x", "model": "m", "temprature": 1},
            "config.temprature=1: there is no such key; .*temperature",
        ),
        ({"base_url": "http://x"}, "config.model=.*write the model that plays the user"),
        ({"base_url": "x", "model": "m"}, "config.base_url=x: write an address with http"),
        ({"base_url": "http://x", "model": "m", "instruction": "Play."}, r"has no \{goal\}"),
    ],
)
def test_a_wrong_user_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedUserInteraction(config)


# ---- environments


class Guessing:
    """Guess a number from 0 to 9, with the interface of gymnasium."""

    made: list["Guessing"] = []

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.closed = False
        self.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.number = (seed or 0) % 10
        self.left = self.tries
        return f"I think of a number of {(options or {}).get('digits', 1)} digit.", {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        hit = int(action) == self.number
        text = "Right." if hit else "Larger." if int(action) < self.number else "Smaller."
        return text, float(hit) - 0.1, hit, not hit and self.left == 0, {"left": self.left}

    def close(self) -> None:
        self.closed = True


class OldGuessing(Guessing):
    """Steps as environments did before gymnasium."""

    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class NumberedGuessing(Guessing):
    """Observes something that is no text."""

    def step(self, action: Any) -> Any:
        return [1, 2], 0.0, False, False, {}


class SlowGuessing(Guessing):
    """Steps only when it may."""

    may_step = threading.Event()

    def step(self, action: Any) -> Any:
        self.may_step.wait()
        assert not self.closed
        return super().step(action)


class Exiting(Guessing):
    """Ends its process, if it can."""

    def step(self, action: Any) -> Any:
        raise (SystemExit if action == "exit" else StopIteration)(3)


def environment(factory: str = "Guessing", **config: Any) -> EnvironmentInteraction:
    return EnvironmentInteraction({"name": "env", "factory": f"{__name__}.{factory}", **config})


def play(interaction: BaseInteraction, replies: list[str], **kwargs: Any) -> list[Any]:
    async def run() -> list[Any]:
        name = await interaction.start_interaction(**kwargs)
        messages: list[dict[str, Any]] = [user("Guess.")]
        turns: list[Any] = []
        for reply in replies:
            messages.append(assistant(reply))
            turns.append(await interaction.generate_response(name, messages))
            messages.append(user(turns[-1][1]))
        turns.append(await interaction.calculate_score(name))
        await interaction.finalize_interaction(name)
        return turns

    return asyncio.run(run())


def test_an_episode_is_a_conversation() -> None:
    first = reset_text(Guessing(), seed=7, options={"digits": 1})
    turns = play(environment(), ["3", "7"], seed=7, options={"digits": 1}, observation=first)
    assert turns[0] == (False, "Larger.", -0.1, {"steps": 1, "truncated": False, "left": 2})
    assert turns[1] == (True, "Right.", 0.9, {"steps": 2, "truncated": False, "left": 1})
    assert turns[2] == pytest.approx(0.8)
    assert Guessing.made[-1].closed


def test_actions_are_found_in_messages() -> None:
    interaction = environment(
        action_pattern=r"<guess>(.*?)</guess>",
        actions={"low": 1, "high": 8},
        no_action_reward=-1,
        arguments={"tries": 2},
    )
    turns = play(interaction, ["low", "<guess>low</guess>... <guess> high </guess>", "<guess>mid</guess>"], seed=5)
    assert [turn[:3] for turn in turns[:3]] == [
        (False, "There is no valid action in your message.", -1.0),
        (False, "Smaller.", -0.1),
        (False, "There is no valid action in your message.", -1.0),
    ]
    assert turns[3] == pytest.approx(-2.1)


def test_a_cut_episode_ends_the_conversation_and_stays_ended() -> None:
    turns = play(environment(arguments={"tries": 1}), ["3", "7"], seed=7)
    assert turns[0] == (True, "Larger.", -0.1, {"steps": 1, "truncated": True, "left": 0})
    assert turns[1] == (True, "", 0.0, {"steps": 1})


def test_an_environment_that_hangs_costs_only_its_episode() -> None:
    """Its place is free at once, and it is closed when its step ends at last."""
    slow, quick = environment("SlowGuessing", num_workers=1), [assistant("3")]

    async def run() -> None:
        name = await slow.start_interaction()
        hanging = Guessing.made[-1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow.generate_response(name, quick), 0.05)
        other = await slow.start_interaction()  # the only place is free
        await slow.finalize_interaction(name)
        assert not hanging.closed
        SlowGuessing.may_step.set()
        while not hanging.closed:
            await asyncio.sleep(0.001)
        assert (await slow.generate_response(other, quick))[1] == "Smaller."
        await slow.finalize_interaction(other)
        assert Guessing.made[-1].closed

    asyncio.run(run())


@pytest.mark.parametrize("action, error", [("exit", r"exit\(3\)"), ("stop", r"StopIteration\(3\)")])
def test_an_environment_that_ends_its_thread_fails(action: str, error: str) -> None:
    with pytest.raises(RuntimeError, match=error):
        play(environment("Exiting"), [action])


def test_a_row_of_another_environment_is_refused() -> None:
    with pytest.raises(
        WrongInput, match="seed 7: the environment's first observation is 'I think .* regenerate the data set"
    ):
        play(environment(), ["3"], seed=7, observation="Another game.")


@pytest.mark.parametrize(
    ("factory", "message"),
    [("OldGuessing", "must return a tuple .observation, reward"), ("NumberedGuessing", "observes list")],
)
def test_environments_of_another_interface_are_named(factory: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        play(environment(factory), ["3"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"factory": "Guessing"}, "config.factory='Guessing': write the dotted name"),
        ({"factory": "no_such_package.make"}, "config.factory=no_such_package.make: No module named"),
        ({"factory": f"{__name__}.GSM8K"}, "cannot be called"),
        ({"factory": f"{__name__}.Guessing", "action_pattern": "("}, "is no regular expression"),
        ({"factory": f"{__name__}.Guessing", "argument": {}}, "config.argument=.*nearest in this node: arguments"),
    ],
)
def test_a_wrong_environment_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        EnvironmentInteraction(config)
