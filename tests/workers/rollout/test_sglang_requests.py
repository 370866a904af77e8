"""What requests may ask of SGLang: grammars, stop texts, biases; and what would end its processes is refused."""

import asyncio
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from examples.tiny_model import byte_tokenizer
from tests.workers.rollout import tiny

pytest.importorskip("sglang")

from tests.workers.rollout.test_sglang_engine import PROMPT, Running
from verl.base_config import WrongInput
from verl.workers.rollout.sglang_rollout.requests import SGLangRequestForm

VOCABULARY = 300  # at least that of the tokenizer
SLOW_GRAMMAR = "([a-z]{3,9}[0-9]{2,7}){1,4}xyz+" * 20


def form_of(**changes: Any) -> SGLangRequestForm:
    config = tiny.rollout_config("sglang", **{"skip_tokenizer_init": False} | changes)
    return SGLangRequestForm(config, SimpleNamespace(eos_token_id=tiny.EOS), 64, VOCABULARY, lambda: 5)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "VOCABULARY", VOCABULARY)
        tiny.build_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    running = Running(folder, skip_tokenizer_init=False)
    yield running
    running.close()


def asked(running: Running, **given: Any) -> dict[str, Any]:
    params = form_of().params(tiny.request({"max_tokens": 12, "seed": 3} | given, PROMPT))
    return running(running.engine.generate(PROMPT, params.values, f"{time.time()}", return_logprob=True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"regex": "[0-9]{3}"}, r"\d{3}"),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"ebnf": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "hey"}}'}, "hey"),
    ],
)
def test_structured_output(running: Running, given: dict[str, Any], text: str) -> None:
    result = asked(running, **given)
    assert result["meta_info"]["finish_reason"]["type"] == "stop"
    assert re.fullmatch(text, result["text"])


@pytest.mark.full
def test_what_a_request_may_ask_for(running: Running) -> None:
    assert asked(running, logit_bias={7: 100})["output_ids"] == [7] * 12
    plain = asked(running)
    stop = plain["text"][0]
    assert plain["meta_info"]["finish_reason"]["type"] == "length"
    assert asked(running, stop=[stop])["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ended = asked(running, stop_regex="[\x00-\U0010ffff]")
    assert len(ended["output_ids"]) < 12
    few = asked(running, logit_bias={tiny.EOS: 100}, min_tokens=4)
    assert len(few["output_ids"]) == 5 and asked(running, logit_bias={tiny.EOS: 100})["output_ids"] == [tiny.EOS]


REFUSED = [
    ({"json_schema": {"type": "integer"}}, "json_schema must be a text, got dict"),
    ({"regex": 5}, "regex must be a text, got int"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex"),
    ({"stop": 5}, "stop must be a text or a list of texts, got 5"),
    ({"stop": [5]}, "stop must be a text or a list of texts"),
    ({"stop_regex": "["}, r"stop_regex='\[': unterminated"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens must be true or false, got 'no'"),
    ({"logit_bias": {"5": "x"}}, "could not convert string to float"),
    ({"logit_bias": {"5": float("nan")}}, "each value must be a finite number"),
    ({"logit_bias": {VOCABULARY: 1.0}}, r"logit_bias must has keys in \[0, 299\]"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("inf")}, "temperature must be a non-negative finite number"),
    ({"stop_token_ids": ["a"]}, "invalid literal"),
    ({"min_tokens": 13}, "min_new_tokens must be in"),
    ({"seed": 2**63}, "sampling_seed must be in"),
    ({"watermark": {"a": 1}}, "watermark contains unknown fields"),
    ({"n": 2}, "SGLang has no option n for a request"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_engine_must_not_see(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        form_of().params(tiny.request({"max_tokens": 12} | given, PROMPT))


@pytest.mark.parametrize("name", ["stop", "stop_regex", "min_tokens", "json_schema", "regex", "ebnf", "structural_tag"])
def test_what_needs_the_tokenizer_says_so(name: str) -> None:
    given = {name: 4 if name == "min_tokens" else "a"}
    with pytest.raises(WrongInput, match="needs the engine's tokenizer: set .*skip_tokenizer_init=false"):
        form_of(skip_tokenizer_init=True).params(tiny.request(given, PROMPT))


@pytest.mark.full
def test_a_grammar_that_is_none_costs_only_its_request(running: Running) -> None:
    for given in ({"regex": "[0-9"}, {"json_schema": '{"type":'}, {"ebnf": "x y z"}, {"structural_tag": "{}"}):
        with pytest.raises(ValueError, match=f"Failed to compile {next(iter(given)).removesuffix('_schema')}"):
            asked(running, **given)
    assert running.engine.death() is None and len(asked(running)["output_ids"]) == 12


class WithMemorySaver:
    """The arguments of an engine that frees memory; on a CPU SGLang's own switch does nothing beyond its checks."""

    enable_memory_saver = True

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


@pytest.mark.full
@pytest.mark.parametrize("grammar", [None, SLOW_GRAMMAR])
def test_memory_is_not_released_under_a_request_that_would_die(
    running: Running, monkeypatch: pytest.MonkeyPatch, grammar: str | None
) -> None:
    """A request without a grammar keeps its tokens and goes on; SGLang's scheduler would die of one that compiles."""
    engine = running.engine
    monkeypatch.setattr(engine._engine, "server_args", WithMemorySaver(engine._engine.server_args))
    params = form_of().params(tiny.request({"max_tokens": 50, "seed": 3, "regex": grammar}, PROMPT))

    async def run() -> dict[str, Any]:
        request = asyncio.create_task(engine.generate(PROMPT, params.values, "r", return_logprob=True))
        while not engine._manager.rid_to_state:
            await asyncio.sleep(0)
        if grammar is not None:
            with pytest.raises(RuntimeError, match="memory cannot be released while 1 requests with json_schema"):
                await engine.release(["kv_cache"])
            request.cancel()
            return {}
        await asyncio.sleep(0.03)
        await engine.release(["kv_cache"])
        with pytest.raises(RuntimeError, match="has released the memory"):
            await engine.generate(PROMPT, params.values, "s", return_logprob=True)
        await engine.resume_memory(["kv_cache"])
        await engine.resume()
        return await request

    result = running(run())
    if grammar is None:
        assert result["output_ids"] == asked(running, max_tokens=50)["output_ids"]
    running(engine.ping())
    assert engine.death() is None and all(psutil.pid_exists(pid) for pid in engine.pids)
