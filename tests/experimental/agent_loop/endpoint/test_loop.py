"""Agents with clients of the ``openai`` package: what they ask becomes the tokens of a trajectory."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import NoTurnError, ServerError, WrongInput
from verl.experimental.agent_loop.endpoint.stops import Rest, cut_at_stop
from verl.experimental.agent_loop.segments import last_segment
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.workers.rollout.server import TokenOutput

from .agents import SAMPLING, TOKENIZER, Agent, ThreadAgent, build, ids

DOCS = Path(__file__).parents[4] / "docs"
Message = dict[str, Any]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def client(base_url: str, api_key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)


def page_code(page: str, name: str) -> Any:
    """Return a class of the Python on a page."""
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL) if name in block
    ]
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return names[name]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def last_word(prompt: str) -> str:
    """Say ``re:`` and the last message."""
    return "re:" + prompt.removesuffix("<|end|><|assistant|>").rpartition("|>")[2]


def run(says: Any, agent: Any, **changes: Any) -> tuple[Any, Any]:
    """Return the output of a trajectory, and its server."""

    async def whole() -> tuple[Any, Any]:
        loop, server = build(says, **changes)
        return last_segment(await loop.run(dict(SAMPLING), agent=agent)), server

    return asyncio.run(whole())


def test_two_turns_are_one_trajectory() -> None:
    """Only what is new is encoded, and the mask is 1 on exactly the sampled tokens."""
    seen: list[Any] = []

    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            messages: list[Any] = [user("one")]
            for text in ("two", None):
                answer = await model.chat.completions.create(
                    model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
                )
                seen.append(answer)
                messages += [answer.choices[0].message, user(text)]
        return 0.5

    output, server = run(last_word, agent)
    assert output.prompt_ids == ids("<|user|>one<|end|><|assistant|>")
    parts = [("re:one<|end|>", 1), ("<|user|>two<|end|><|assistant|>", 0), ("re:two<|end|>", 1)]
    assert output.response_ids == [token for text, _ in parts for token in ids(text)]
    assert output.response_mask == [mask for text, mask in parts for _ in ids(text)]
    sampled = [-0.25 * number for number in range(1, 8)]
    assert output.response_logprobs == [*sampled, *[0.0] * len(ids(parts[1][0])), *sampled]
    assert output.reward_score == 0.5 and output.num_turns == 4 and output.extra_fields["segments"] == 1
    assert [turn.role for turn in output.turns] == ["assistant", "user", "assistant"]
    assert [turn["end"] for turn in output.extra_fields[TURNS_COLUMN]] == [7, 13, 20]
    first, second = seen
    assert [each.choices[0].message.content for each in seen] == ["re:one", "re:two"]
    assert first.choices[0].finish_reason == "stop" and first.object == "chat.completion"
    assert first.choices[0].token_ids == ids("re:one<|end|>") and first.prompt_token_ids == output.prompt_ids
    assert second.prompt_token_ids == output.prompt_ids + output.response_ids[:-7]
    assert [each.logprob for each in second.choices[0].logprobs.content] == sampled
    assert second.usage.completion_tokens == 7 and second.usage.prompt_tokens == len(second.prompt_token_ids)
    asked = [params for _, _, params in server.asked]
    assert [params["max_tokens"] for params in asked] == [96, 96 - 7 - len(ids(parts[1][0]))]
    assert asked[0]["seed"] == SAMPLING["seed"] != asked[1]["seed"]
    names = {name.rpartition("/")[0] for name, _, _ in server.asked}
    assert len(names) == 1  # one conversation: it stays where its prefix is cached
    assert run(last_word, agent)[1].asked[1][2] == asked[1]  # a replay has the same seeds


def test_what_the_model_sampled_is_never_encoded_again() -> None:
    """A client that strips the text, rewrites arguments and leaves out empty fields continues its trajectory."""
    call = '<tool_call>\n{"name":  "weather", "arguments": {"a": 1,  "b": [2]}}\n</tool_call>'

    async def agent(base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as model:
            messages: list[Any] = [user("hot?")]
            answer = await model.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
            (used,) = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content == " Hm. "
            assert json.loads(used.function.arguments) == {"a": 1, "b": [2]} and used.id == "c00000000"
            rewritten = {"name": used.function.name, "arguments": '{"b":[2],"a":1}'}
            calls = [{"id": used.id, "type": "function", "function": rewritten}]
            messages.append({"role": "assistant", "content": "Hm.", "tool_calls": calls})
            messages.append({"role": "tool", "content": "30", "tool_call_id": used.id})
            answer = await model.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
            assert answer.choices[0].message.content == "re:30"

    said = f" Hm. {call}"
    output, _ = run(lambda prompt: said if "tool" not in prompt else last_word(prompt), agent)
    assert output.reward_score is None and output.extra_fields["segments"] == 1
    assert output.response_ids == ids(f"{said}<|end|><|tool|>30<|end|><|assistant|>re:30<|end|>")
    assert sum(output.response_mask) == len(ids(f"{said}<|end|>re:30<|end|>"))
    (used,) = output.turns[1].calls
    assert (used.name, used.text, output.turns[1].role) == ("weather", "30", "tool") and output.metrics.tool_calls > 0


def test_a_changed_history_starts_a_segment() -> None:
    """Each request continues the conversation that it repeats; a row of the last segment holds the others."""

    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:

            async def ask(*messages: Message) -> Message:
                answer = await model.chat.completions.create(model="any", messages=list(messages))
                return {"role": "assistant", "content": answer.choices[0].message.content}

            first = await ask(user("one"))
            forged = {"role": "assistant", "content": "something else"}
            other = await ask(user("one"), forged, user("two"))  # a new segment
            await ask(user("one"), first, user("three"))  # continues the first
            await ask(user("one"), forged, user("two"), other, user("four"))  # continues the second
        return 1.0

    output, server = run(last_word, agent)
    assert output.extra_fields["segments"] == 2 and output.reward_score == 1.0 and output.num_turns == 7
    (before,) = output.earlier
    assert before.prompt_ids == ids("<|user|>one<|end|><|assistant|>") and before.reward_score is None
    assert before.response_ids == ids("re:one<|end|><|user|>three<|end|><|assistant|>re:three<|end|>")
    assert output.prompt_ids == ids(
        "<|user|>one<|end|><|assistant|>something else<|end|><|user|>two<|end|><|assistant|>"
    )
    assert output.response_ids == ids("re:two<|end|><|user|>four<|end|><|assistant|>re:four<|end|>")
    assert len({params["seed"] for _, _, params in server.asked}) == 4
    third = server.asked[2][1]
    assert third == ids("<|user|>one<|end|><|assistant|>re:one<|end|><|user|>three<|end|><|assistant|>")


def test_a_later_segment_may_start_with_a_longer_prompt() -> None:
    """What its prompt has beyond that of a row is taken from the room of its answers."""

    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            for length in (2, 50, 80):
                try:
                    await model.chat.completions.create(model="any", messages=[user("x" * length)])
                except openai.BadRequestError as error:
                    assert length == 80 and "a later segment of a trajectory has room for 70" in str(error)
        return 1.0

    output, server = run(lambda _: "yes", agent, prompt_length=30, response_length=40)
    assert [params["max_tokens"] for _, _, params in server.asked] == [40, 70 - 53]
    asked = server.asked[1][1]
    assert output.extra_fields["segments"] == 2 and len(output.earlier) == 1 and output.prompt_ids == asked
    first, last = output.earlier[0], last_segment([output.earlier[0], output], 30, 40)
    assert len(first.prompt_ids) == 5 and last.prompt_ids == asked[:30]
    assert last.response_ids == asked[30:] + ids("yes<|end|>") and last.response_mask == [0] * 23 + [1] * 4
    assert last.extra_fields["cut_segments"] == 0


def test_parallel_requests_are_segments_of_their_own() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            names = ("a", "b", "c", "a")
            asks = [model.chat.completions.create(model="any", messages=[user(text)]) for text in names]
            answers = await asyncio.gather(*asks)
            assert [answer.choices[0].message.content for answer in answers] == [f"re:{name}" for name in names]
        return 1.0

    output, server = run(last_word, agent)
    assert output.extra_fields["segments"] == 4 and len(server.asked) == 4


def test_completions_continue_their_text_and_their_tokens() -> None:
    async def agent(base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as model:
            said = await model.completions.create(model="any", prompt="ab", max_tokens=2, logprobs=1)
            assert said.choices[0].text == "xy" and said.choices[0].finish_reason == "length"
            assert said.choices[0].logprobs.token_logprobs == [-0.25, -0.5]
            await model.completions.create(model="any", prompt="abxy, cd", max_tokens=1)
            tokens = ids("abxy, cdx")
            said = await model.completions.create(
                model="any", prompt=[*tokens, 5], stop="z", extra_body={"return_token_ids": True}
            )
            assert said.choices[0].text == "xy" and said.choices[0].token_ids == ids("xyz")
            assert said.choices[0].prompt_token_ids == [*tokens, 5] and said.choices[0].finish_reason == "stop"

    output, _ = run(lambda prompt: "xyzw", agent)
    assert output.extra_fields["segments"] == 1 and output.prompt_ids == ids("ab")
    assert output.response_ids == [*ids("xy, cdx"), 5, *ids("xyz")]
    assert output.response_mask == [1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert output.turns[-1].versions == [(3, 3)] and output.turns[-1].finish_reason == "stop"


@pytest.mark.parametrize("written", ["", "</s>", "</s>\n", "</s>\n\n", "<b>"])
def test_a_stop_text_is_read_once(written: str) -> None:
    """Answers lack it, so agents add it; the model has sampled it. The last token may hold more than the stop text."""
    tail = "</s>\n"

    async def agent(base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as model:
            text = "ab"
            for _ in range(3):
                said = await model.completions.create(model="any", prompt=text, stop=["</s>\n", "</s>"])
                assert said.choices[0].text == "x<"
                text += f"x<{written}cd"

    output, _ = run(lambda prompt: f"x<{tail}more", agent, response_length=90)
    # The byte tokenizer samples the stop text "</s>" whole before its line break.
    added = written.removeprefix("</s>") + "cd"
    parts = [("x<</s>", 1), (added, 0), ("x<</s>", 1), (added, 0), ("x<</s>", 1)]
    assert output.extra_fields["segments"] == 1
    assert output.response_ids == [token for text, _ in parts for token in ids(text)]
    assert output.response_mask == [mask for text, mask in parts for _ in ids(text)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.text("ab", max_size=9), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.text("ab", max_size=4)
)
def test_the_tokens_hold_a_text_and_its_rest(said: str, stops: list[str], later: str) -> None:
    output = TokenOutput(ids(said), None, "stop", [(0, len(said))])
    cut, text, rest = cut_at_stop(TOKENIZER, output, stops)
    assert TOKENIZER.decode(cut.token_ids) == text + rest.text and said.startswith(text + rest.text)
    found = [stop for stop in stops if stop in said]
    assert not any(stop in text for stop in stops) and (rest.text[: rest.size] in found or not found)
    assert rest.taken_from(rest.text + later) == later  # an agent that adds the rest
    if not (later and rest.text and later.startswith(rest.text[: rest.size])):
        assert rest.taken_from(later) == later  # an agent that does not


def test_what_the_last_token_adds_to_a_stop_text_stays_sampled() -> None:
    rest = Rest("</s>\n\n", len("</s>"))
    cases = {"</s>": "", "</s>\nx": "x", "</s>\n\nx": "x", "</s>x": "x", "<s>": "<s>", "": "", "\n": "\n"}
    assert {later: rest.taken_from(later) for later in cases} == cases


def test_an_agent_that_writes_the_chat_itself_has_one_end_per_turn() -> None:
    async def agent(base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as model:
            text = "<|user|>a<|end|><|assistant|>"
            for _ in range(2):
                said = await model.completions.create(model="any", prompt=text)
                text += f"{said.choices[0].text}<|end|><|user|>b<|end|><|assistant|>"

    output, _ = run(lambda prompt: "yes", agent)
    assert output.extra_fields["segments"] == 1
    assert output.response_ids == ids("yes<|end|><|user|>b<|end|><|assistant|>yes<|end|>")


def test_a_chat_may_show_the_stop_text_of_an_answer() -> None:
    async def agent(base_url: str, api_key: str) -> None:
        async with client(base_url, api_key) as model:
            messages: list[Any] = [user("a")]
            for written in ("", "</s>", ""):
                said = await model.chat.completions.create(model="any", messages=messages, stop="</s>")
                assert said.choices[0].message.content == "yes"
                messages += [{"role": "assistant", "content": f"yes{written}"}, user("b")]

    output, _ = run(lambda prompt: "yes</s> and", agent)
    assert output.extra_fields["segments"] == 1
    assert output.response_ids == ids("yes</s>" + "<|end|><|user|>b<|end|><|assistant|>yes</s>" * 2)


def test_the_agent_of_the_page() -> None:
    """It calls its tool, tells the model of broken calls, and scores the last message."""
    says = iter(
        [
            '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>',
            '<tool_call>{"name": "multiply", "arguments": {"a": "x"}}</tool_call>',
            "It is 42.",
        ]
    )

    async def whole() -> Any:
        loop, _ = build(
            lambda prompt: next(says), loop=page_code("advance/endpoint.md", "Calculates"), response_length=300
        )
        return await loop.run(dict(SAMPLING), raw_prompt=[user("6*7")], reward_model={"ground_truth": "42"})

    output = asyncio.run(whole())
    assert output.reward_score == 1.0 and output.num_turns == 6 and output.extra_fields["segments"] == 1
    assert [call.text for turn in output.turns for call in turn.calls] == ["42", "error: a and b must be numbers"]


def test_an_argument_that_no_loop_takes_is_refused() -> None:
    async def made(loop: Any, **arguments: Any) -> Any:
        return build(last_word, loop=loop, **arguments)[0]

    class Own(Agent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.said = kwargs["word"]

    with pytest.raises(WrongInput, match="'client_samplng' is unknown: Agent takes client_sampling"):
        asyncio.run(made(Agent, client_samplng="apply"))
    with pytest.raises(WrongInput, match="'word' is unknown: Agent takes answer_timeout_s, client_sampling, encode"):
        asyncio.run(made(Agent, word="a"))
    assert asyncio.run(made(Own, word="a")).said == "a"


def test_a_plain_function_acts_in_a_thread() -> None:
    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as model:
            with model.chat.completions.create(
                model="any", messages=[user("one")], stream=True, stream_options={"include_usage": True}
            ) as stream:
                first, last = list(stream)
            assert first.choices[0].delta.content == "re:one" and first.choices[0].finish_reason == "stop"
            assert last.usage is not None and last.usage.completion_tokens == 7
            assert [each.id for each in model.models.list()] == ["tiny"]
        return 1

    output, _ = run(last_word, agent, loop=ThreadAgent)
    assert output.reward_score == 1.0


def test_a_full_trajectory_ends_by_a_refusal() -> None:
    """An agent that does not catch it gives what it has so far; the reward function decides."""

    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            messages: list[Any] = [user("one")]
            while True:
                answer = await model.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, user("more")]

    output, _ = run(last_word, agent, response_length=40)
    turns = [turn.finish_reason for turn in output.turns if turn.role == "assistant"]
    assert turns[0] == "stop" and output.reward_score is None and 0 < len(output.response_ids) <= 40
    with pytest.raises(openai.BadRequestError, match="the prompt has 6 tokens.*at most 5 .data.max_prompt_length"):
        run(last_word, agent, prompt_length=5)


@pytest.mark.parametrize("gives_up", [True, False])
def test_an_agent_whose_servers_fail_fails_by_their_name(gives_up: bool) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            try:
                await model.chat.completions.create(model="any", messages=[user("one")])
            except openai.InternalServerError as error:
                assert error.status_code == 503 and "no more memory" in error.message
                if not gives_up:
                    raise
        return 0.0

    with pytest.raises(ServerError, match="no more memory"):
        run(lambda prompt: ServerError("the engine: no more memory"), agent)


def test_agents_that_give_nothing_to_train() -> None:
    async def idle(base_url: str, api_key: str) -> float:
        return 1.0

    async def colder(base_url: str, api_key: str) -> float:
        async with client(base_url, api_key) as model:
            try:
                await model.chat.completions.create(model="any", messages=[user("one")], temperature=0.2)
            except openai.BadRequestError:
                pass
        return 1.0

    async def odd(base_url: str, api_key: str) -> Any:
        async with client(base_url, api_key) as model:
            await model.chat.completions.create(model="any", messages=[user("one")])
        return float("nan")

    with pytest.raises(NoTurnError, match="Agent.act has ended without an answer .*asked the endpoint for nothing"):
        run(last_word, idle)
    with pytest.raises(NoTurnError, match=r"temperature=0.2: the run samples with temperature=1.0.*client_sampling"):
        run(last_word, colder)
    for how, used in (("apply", 0.2), ("ignore", 1.0)):
        assert run(last_word, colder, client_sampling=how)[1].asked[0][2]["temperature"] == used
    with pytest.raises(ValueError, match="act returned nan: return a finite number"):
        run(last_word, odd)
    with pytest.raises(ValueError, match="client_sampling='allow': must be one of refuse, ignore, apply"):
        run(last_word, odd, client_sampling="allow")
