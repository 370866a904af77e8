"""Each key of sampling reaches the requests of each way to generate, or is refused by name."""

import asyncio
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.workers.rollout import tiny
from verl.base_config import WrongInput
from verl.experimental.agent_loop.endpoint.requests import RequestError, parse_completion
from verl.experimental.agent_loop.endpoint.session import Policy, Session
from verl.experimental.agent_loop.endpoint.templates import Templates
from verl.experimental.agent_loop.worker import AgentLoopWorkerBase
from verl.protocol import DataProto, tensors_of
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.generation_server import parse_generation_server
from verl.trainer.config.validation import examined_config
from verl.trainer.generation_server import ServerGeneration
from verl.utils.numerics.seeding import RequestSeeds
from verl.workers.config import SamplingConfig
from verl.workers.rollout import base, get_rollout_class
from verl.workers.rollout.hf_rollout import Sampler

FORMS = {"vllm": "vllm_rollout.requests.VLLMRequestForm", "sglang": "sglang_rollout.requests.SGLangRequestForm"}
MODEL = SimpleNamespace(eos_token_id=tiny.EOS, pad_token_id=tiny.PAD)
TRAINING = {"temperature": 0.7, "top_p": 0.6, "top_k": 5}
VALIDATION = {"temperature": 0.4, "top_p": 0.9, "top_k": 3}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
CASES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "training": ({}, TRAINING),
    "validation": ({"validate": True, "do_sample": True}, VALIDATION),
    "greedy": ({"validate": True, "do_sample": False}, GREEDY),
}


def config_of(name: str, **changes: Any) -> Any:
    sampling = TRAINING | {"repetition_penalty": 1.3, "val_kwargs": SamplingConfig(do_sample=True, **VALIDATION)}
    return tiny.rollout_config(name, **{**sampling, "skip_tokenizer_init": False, **changes})


def engine_values(params: Any) -> dict[str, Any]:
    """What a request asks of vLLM, or of SGLang."""
    if hasattr(params, "stop_token_ids"):
        found = {
            name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
        }
        found |= {"top_k": params.top_k or -1, "max_tokens": params.max_tokens, "logprobs": params.logprobs is not None}
        return found | {"ends": list(params.stop_token_ids)}
    values = params.values
    found = {name: values[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    found |= {"seed": values.get("sampling_seed"), "max_tokens": values["max_new_tokens"]}
    return found | {"logprobs": params.log_probs, "ends": values["stop_token_ids"]}


def form_of(name: str, config: Any) -> Any:
    pytest.importorskip(name)
    form: Any = resolve_name(f"verl.workers.rollout.{FORMS[name]}")
    return form(config, MODEL, 64, tiny.VOCABULARY, lambda: 5)


def offline(name: str, config: Any, prompts: DataProto) -> dict[str, Any]:
    """The rollout in the workers' processes, as ``main_generation`` and ``mode=sync`` use it."""
    pytest.importorskip(name)
    cls = get_rollout_class(name)
    rollout: Any = cls.__new__(cls)
    rollout.config, rollout.seeds = config, RequestSeeds(1)
    params = rollout._sampling_params(prompts)[0]
    return engine_values(params if name == "vllm" else form_of(name, config).params(tiny.request(params)))


def loop_params(config: Any, prompts: DataProto) -> dict[str, Any]:
    worker: Any = SimpleNamespace(rollout_config=config)
    params = AgentLoopWorkerBase._sampling_params(worker, prompts)[0]
    return {"max_tokens": config.response_length, **params}  # as the loop that asks once


def server(name: str, config: Any, prompts: DataProto) -> dict[str, Any]:
    """A request of an agent loop to a server."""
    return engine_values(form_of(name, config).params(tiny.request(loop_params(config, prompts))))


def endpoint(name: str, config: Any, prompts: DataProto) -> dict[str, Any]:
    """A request of an agent that is a program, in a trajectory of the run."""
    asked: list[Any] = []

    class Servers:
        async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any) -> Any:
            asked.append(sampling_params)
            raise TimeoutError("enough")

    policy: Any = Policy(
        server_manager=Servers(),  # type: ignore[arg-type]
        templates=Templates(None, {}),
        parser=None,  # type: ignore[arg-type]
        model="m",
        prompt_length=8,
        response_length=config.response_length,
    )
    params = loop_params(config, prompts)
    params.pop("max_tokens")
    session = Session(policy, params)
    with pytest.raises(RequestError):
        asyncio.run(session.complete(parse_completion({"prompt": [4, 5, 6]})))
    given = asked[0]
    if given.get("seed") is not None:
        given["seed"] = params["seed"]  # a turn derives its own
    return engine_values(form_of(name, config).params(tiny.request(given)))


def transformers_rollout(name: str, config: Any, prompts: DataProto) -> dict[str, Any]:
    """What the processors of ``name=hf`` do."""
    sampler = Sampler(base.sampling_values(prompts, config), [0], torch.device("cpu"))
    found: dict[str, Any] = dict(GREEDY)
    for processor in sampler._processors:
        if isinstance(processor, TemperatureLogitsWarper):
            found["temperature"] = processor.temperature
        elif isinstance(processor, TopKLogitsWarper):
            found["top_k"] = processor.top_k
        elif isinstance(processor, TopPLogitsWarper):
            found["top_p"] = processor.top_p
        else:
            assert isinstance(processor, RepetitionPenaltyLogitsProcessor)
            found["repetition_penalty"] = processor.penalty
    rollout: Any = SimpleNamespace(config=config, seeds=RequestSeeds(1))
    ends = base.BaseRollout._end_tokens(rollout, prompts)
    seeds = base.BaseRollout._sampling_seeds(rollout, prompts)
    more = {"seed": None if seeds is None else seeds[0], "max_tokens": config.response_length}
    return found | more | {"logprobs": config.calculate_log_probs, "ends": ends}


PATHS = {
    "vllm": (offline, "vllm"),
    "vllm server": (server, "vllm"),
    "vllm endpoint": (endpoint, "vllm"),
    "sglang": (offline, "sglang"),
    "sglang server": (server, "sglang"),
    "sglang endpoint": (endpoint, "sglang"),
    "hf": (transformers_rollout, "hf"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_each_key_reaches_each_path(path: str, case: str) -> None:
    ask, name = PATHS[path]
    meta, expected = CASES[case]
    config = config_of(name, response_length=7)
    prompts = tiny.prompts_batch(1, **meta)
    seed = None if case == "greedy" else int(tensors_of(prompts)["sampling_seed"][0])
    found = ask(name, config, prompts)
    more = {"repetition_penalty": 1.3, "max_tokens": 7, "logprobs": True, "seed": seed, "ends": [tiny.EOS]}
    assert found == expected | more
    off = config_of(name, response_length=7, ignore_eos=True, calculate_log_probs=False, repetition_penalty=1.0)
    found = ask(name, off, prompts)
    assert (found["ends"], found["logprobs"]) == ([], False) and found.get("repetition_penalty", 1.0) == 1.0


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_each_key_of_a_request_reaches_the_engine_or_is_refused(name: str) -> None:
    """Of requests that a user's own agent loop sends to a server."""
    form = form_of(name, config_of(name))
    given = {"min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ["x"], "max_tokens": 4, "seed": 9}
    params = form.params(tiny.request(given))
    found = vars(params) if name == "sglang" else {key: getattr(params, key) for key in given}
    values = found["values"] if name == "sglang" else found
    for key, value in given.items():
        own = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}.get(key, key) if name == "sglang" else key
        assert values[own] == value, key
    for key, value in {"n": 2, "do_sample": False, "best_of": 2, "output_kind": 0}.items():
        with pytest.raises(WrongInput, match=key):
            form.params(tiny.request({key: value}))


def test_the_generation_server_asks_what_offline_generation_asks() -> None:
    for changes in ({}, {"do_sample": False}, {"temperature": 0.0}):
        config = tiny.rollout_config("vllm", **TRAINING | {"repetition_penalty": 1.3} | changes)
        generation: Any = object.__new__(ServerGeneration)
        generation.config = SimpleNamespace(data=SimpleNamespace(n_samples=2))
        generation.rollout, generation.prompts = config, [[5, 6, 7]]
        bodies = list(generation._bodies(0))
        prompts = tiny.prompts_batch(1, do_sample=not changes)
        expected = base.sampling_values(prompts, config)
        for body in bodies:
            options = parse_completion(body).options
            assert dict(options.sampling) == expected | ({} if changes else {"seed": body["seed"]})
            assert options.max_tokens == config.response_length
        assert len({body.get("seed") for body in bodies}) == (1 if changes else 2)


FOREIGN = ("min_p", "presence_penalty", "frequency_penalty", "stop", "max_tokens", "logprobs", "best_of")
TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ppo_trainer": (
        lambda config: examined_config(config).checked(),
        ("actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"),
    ),
    "generation": (GenerationConfig.parse, ("rollout", "rollout.val_kwargs")),
    "generation_server": (parse_generation_server, ("actor_rollout_ref.rollout",)),
}


@pytest.mark.parametrize("tree", TREES)
def test_a_key_that_the_configuration_does_not_have_is_refused_by_name(tree: str) -> None:
    parse, nodes = TREES[tree]
    given = [f"{node}.{key}" for node in nodes for key in FOREIGN]
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose(tree, [f"+{key}=1" for key in given])
    with pytest.raises(ValueError) as error:
        parse(composed)
    assert [key for key in given if f"{key}=1" not in str(error.value)] == []


# ---- log-probabilities that are subtracted


def test_log_probs_carry_their_temperature_and_meet_only_at_one() -> None:
    config = config_of("hf")
    assert base.log_prob_temperature(tiny.prompts_batch(1), config) == {"temperature": 0.7}
    assert base.log_prob_temperature(tiny.prompts_batch(1, do_sample=False), config) == {}
    assert base.log_prob_temperature(tiny.prompts_batch(1), config_of("hf", calculate_log_probs=False)) == {}

    def part(name: str, **meta: Any) -> DataProto:
        return DataProto.from_dict({name: torch.zeros(2, 3)}, meta_info=meta)

    batch = part("rollout_log_probs", temperature=0.7).union(part("old_log_probs", temperature=0.7))
    batch = batch.union(part("values"))
    with pytest.raises(ValueError, match=r"'temperature'.* are at 0\.7, those to add at 1\.0"):
        batch.union(part("ref_log_prob", temperature=1.0))
    assert "ref_log_prob" not in tensors_of(batch).keys()
