"""Agent loops on a real engine of this process: their rows, their names, and what fails."""

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import CHAT_TEMPLATE, byte_tokenizer
from tests.workers.rollout import tiny
from verl.errors import WrongInput, WrongSetting
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, AgentLoopWorkerBase, register
from verl.experimental.agent_loop.attempts import TrajectoryError
from verl.experimental.agent_loop.manager import _split
from verl.experimental.agent_loop.registry import read_agent_loops
from verl.experimental.agent_loop.rows import rows_of
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN
from verl.protocol import DataProto
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.ppo.phases import check_rollout
from verl.workers.rollout.server import TokenOutput
from verl.workers.rollout.vllm_rollout.requests import VLLMRequestForm

pytest.importorskip("vllm")


class Remote:
    """A method as Ray offers it, without a process in between."""

    def __init__(self, method: Any) -> None:
        self.remote = method


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model, folder = tiny.build_model(), tmp_path_factory.mktemp("agent_loop")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    rollout = tiny.start_rollout("vllm", model, folder, mode="async", max_model_len=64, skip_tokenizer_init=False)
    tiny.load_all(rollout, model)
    asyncio.run(rollout.resume(["weights", "kv_cache"]))
    rollout.folder = folder
    yield rollout
    rollout.shutdown()


class Server:
    """The engine of this process as a server, which answers after a random delay."""

    def __init__(self, engine: Any, most_s: float = 0.0) -> None:
        self.engine, self.most_s = engine, most_s
        self.generate, self.abort = Remote(self._generate), Remote(engine.abort)
        self.count = 0

    async def _generate(self, **request: Any) -> Any:
        self.count += 1
        await asyncio.sleep(random.random() * self.most_s)
        output = await self.engine.generate(**request)
        await asyncio.sleep(random.random() * self.most_s)
        return output


def build_worker(
    engine: Any,
    servers: Sequence[Any] = (),
    response_length: int = tiny.RESPONSE_LENGTH,
    multi_turn: dict[str, Any] | None = None,
    **agent: Any,
) -> AgentLoopWorkerBase:
    changes = {
        "model.path": engine.folder,
        "rollout.name": "vllm",
        "rollout.mode": "async",
        "rollout.prompt_length": tiny.PROMPT_LENGTH,
        "rollout.response_length": response_length,
        "rollout.temperature": tiny.TEMPERATURE,
        "rollout.calculate_log_probs": True,
        **{f"rollout.agent.{name}": value for name, value in agent.items()},
        **{f"rollout.multi_turn.{name}": value for name, value in (multi_turn or {}).items()},
    }
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = compose("ppo_trainer", [f"actor_rollout_ref.{key}={value}" for key, value in changes.items()])
    return AgentLoopWorkerBase(config, servers or [Server(engine)])


def requests() -> DataProto:
    prompts = tiny.prompts_batch(4, repeat=2)
    prompts.non_tensor_batch["extra"] = np.array([{"row": row} for row in range(len(prompts))], dtype=object)
    return prompts


@register("twice")
class Twice(AgentLoopBase):
    """Asks, adds the tokens 7 and 8 as a tool would, and asks again."""

    def __init__(self, *args: Any, added: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.added = list(added or [7, 8])

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = list(kwargs["raw_prompt_ids"])
        limits = {"max_tokens": 3, "stop_token_ids": []}
        first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params | limits)
        tokens = [*prompt, *first.token_ids, *self.added]
        second = await self.server_manager.generate("a", prompt_ids=tokens, sampling_params=sampling_params | limits)
        gap = [0] * len(self.added)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *self.added, *second.token_ids],
            response_mask=[*[1] * len(first.token_ids), *gap, *[1] * len(second.token_ids)],
            response_logprobs=[*(first.log_probs or []), *gap, *(second.log_probs or [])],
            num_turns=4,
            metrics={"tool_calls": 0.5},
            extra_fields={"seen": kwargs["extra"]["row"], "sampled": [len(first.token_ids), len(second.token_ids)]},
        )


def test_one_turn_gives_what_a_batch_gives(engine: Any) -> None:
    asked = requests()
    expected = engine.generate_sequences(asked)
    found = asyncio.run(build_worker(engine).generate_sequences(asked))
    for name, tensor in expected.batch.items():
        assert torch.equal(found.batch[name], tensor), name
    carried = set(expected.non_tensor_batch)
    assert set(found.non_tensor_batch) == carried | {"__num_turns__"}
    assert found.non_tensor_batch["__num_turns__"].tolist() == [2] * len(asked)
    assert found.meta_info["versions"] == [engine.weights_version] * len(asked)
    counts = [[(engine.weights_version, int(mask.sum()))] for mask in found.batch["response_mask"]]
    assert found.meta_info["sampled_by"] == counts
    assert all(seconds["generate_sequences"] > 0 for seconds in found.meta_info["seconds"])
    asked.meta_info["do_sample"] = False
    greedy = asyncio.run(build_worker(engine).generate_sequences(asked))
    assert torch.equal(greedy.batch["responses"], engine.generate_sequences(asked).batch["responses"])


def test_a_stop_text_ends_a_response_and_stays_in_its_tokens(engine: Any) -> None:
    """The engine finds it in what it has sampled, also across tokens; what was sampled before it does not change."""
    tokenizer = byte_tokenizer()
    prompt, params = [5, 6, 7], {"temperature": 1.0, "seed": 3, "max_tokens": 30, "logprobs": True}
    whole = asyncio.run(engine.generate(prompt, params, "whole"))
    text = tokenizer.decode(whole.token_ids[4:7])
    size = next(count for count in range(31) if text in tokenizer.decode(whole.token_ids[:count]))
    assert 1 < size < 30 and len(text) > 1
    found = asyncio.run(engine.generate(prompt, params | {"stop": ["no such text", text]}, "stopped"))
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:size], "stop")
    assert found.log_probs == whole.log_probs[:size]


def test_a_loop_may_go_past_the_end_token() -> None:
    model_config: Any = SimpleNamespace(eos_token_id=tiny.EOS)
    form = VLLMRequestForm(tiny.rollout_config("vllm"), model_config, 64, tiny.VOCABULARY, lambda: 1)
    assert form.params(tiny.request({})).stop_token_ids == [tiny.EOS]
    assert form.params(tiny.request({"ignore_eos": True, "stop_token_ids": [9]})).stop_token_ids == [9]


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [(8, 3, [3, 3, 2]), (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]), (7, 7, [1] * 7), (0, 2, [0, 0])],
)
def test_rows_that_workers_do_not_divide(count: int, parts: int, sizes: list[int]) -> None:
    assert _split(count, parts) == sizes


def test_files_of_tools_that_no_row_reads_are_named(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker = build_worker(engine, multi_turn={"tool_config_path": "tools.yaml"})
    for _ in range(2):
        asyncio.run(worker.generate_sequences(requests()))
    (message,) = [message for message in caplog.messages if "multi_turn" in message]
    assert "multi_turn.tool_config_path=tools.yaml: has no effect, all rows go to single_turn_agent" in message


def test_loops_of_a_file(engine: Any, tmp_path: Path) -> None:
    """Rows choose their loop; the mask is 1 on exactly the sampled tokens, and their log-probabilities are kept."""
    path = tmp_path / "loops.yaml"
    path.write_text(yaml.dump([{"name": "adds", "_target_": f"{__name__}.Twice", "added": [9]}]))
    asked = requests()
    asked.non_tensor_batch["agent_name"] = np.array(["twice", "adds"] * 4, dtype=object)
    worker = build_worker(engine, agent_loop_config_path=path, default_agent_loop="adds")
    found = asyncio.run(worker.generate_sequences(asked))
    tokens, mask = found.batch["responses"], found.batch["response_mask"]
    for row in range(len(asked)):
        added = [7, 8] if row % 2 == 0 else [9]
        first, second = found.non_tensor_batch["sampled"][row]  # 3, unless the end token came before
        length = first + len(added) + second
        expected = [1] * first + [0] * len(added) + [1] * second + [0] * (tiny.RESPONSE_LENGTH - length)
        assert mask[row].tolist() == expected
        assert tokens[row, first : first + len(added)].tolist() == added
        assert found.batch["attention_mask"][row, tiny.PROMPT_LENGTH :].sum() == length
    assert found.non_tensor_batch["sampled"].tolist().count([3, 3]) > 2
    assert found.non_tensor_batch["seen"].tolist() == list(range(len(asked)))
    model = tiny.build_model()
    reference = tiny.reference_log_probs(model, found, tiny.TEMPERATURE)
    torch.testing.assert_close(found.batch["rollout_log_probs"], reference, atol=1e-4, rtol=0)  # fp32, two layers
    del asked.non_tensor_batch["agent_name"]
    again = asyncio.run(worker.generate_sequences(asked))
    turns = again.non_tensor_batch["sampled"]
    assert all(again.batch["responses"][row, first] == 9 for row, (first, _) in enumerate(turns))


def test_a_loop_that_cannot_be_built_ends_the_run(engine: Any, tmp_path: Path) -> None:
    """Whatever the policy says: it is wrong for every row. Loops of rows are built before their first row."""
    tools = tmp_path / "tools.yaml"
    tools.write_text(yaml.dump({"tools": [{"class_name": "no.such.Tool", "config": {"type": "native"}}]}))
    loops = tmp_path / "loops.yaml"
    loops.write_text(yaml.dump([{"name": "bad", "_target_": f"{__name__}.Twice", "added": 9}]))
    turns, agent = {"tool_config_path": tools}, {"on_failure": "drop", "agent_loop_config_path": loops}
    worker = build_worker(engine, multi_turn=turns, default_agent_loop="tool_agent", **agent)
    with pytest.raises(WrongInput, match=r"agent loop tool_agent cannot be built: .*no\.such\.Tool"):
        asyncio.run(worker.prepare())
    asked = requests()
    asked.non_tensor_batch["agent_name"] = np.array(["single_turn_agent", "bad"] * 4, dtype=object)
    with pytest.raises(WrongInput, match="agent loop bad cannot be built: .*not iterable"):
        asyncio.run(worker.generate_sequences(asked))
    assert worker.server_manager._servers[0].handle.count == 0


def test_unknown_loops_and_failing_loops_are_named(engine: Any) -> None:
    asked = requests()
    asked.non_tensor_batch["agent_name"] = np.array([None, "twise", *[None] * (len(asked) - 2)], dtype=object)
    with pytest.raises(WrongSetting, match=r"agent_name=twise: .*the nearest: twice"):
        asyncio.run(build_worker(engine).generate_sequences(asked))
    asked.non_tensor_batch["agent_name"][:] = "twice"
    del asked.non_tensor_batch["extra"]
    with pytest.raises(
        TrajectoryError, match=r"row (\d) \(uid row\1, sample 0\): agent loop twice failed .*KeyError: 'extra'"
    ):
        asyncio.run(build_worker(engine).generate_sequences(asked))


@register("slow twice")
class SlowTwice(Twice):
    """``Twice`` with a tool that takes its time, and fails as often as ``failures`` says for the row."""

    most_s = 0.0
    failures: Counter[int] = Counter()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        row = kwargs["extra"]["row"]
        self.added = [3 + row % 5]
        await asyncio.sleep(random.random() * self.most_s)
        if self.failures[row]:
            self.failures[row] -= 1
            raise OSError("the sandbox is full")
        return await super().run(sampling_params, **kwargs)


def test_a_run_replays_whatever_servers_and_tools_take(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random delays, two servers, failures that another attempt mends: equal bit for bit; turns have seeds."""
    asked = requests()
    asked.meta_info["global_steps"] = 7
    kept = []
    failures: Counter[int] = Counter({1: 1, 4: 3, 6: 1})
    for most_s, failing in ((0.0, Counter()), (0.3, Counter()), (0.3, failures)):
        monkeypatch.setattr(SlowTwice, "most_s", most_s)
        monkeypatch.setattr(SlowTwice, "failures", failing)
        servers = [Server(engine, most_s / 2), Server(engine, most_s / 2)]
        worker = build_worker(engine, servers, default_agent_loop="slow twice", on_failure="retry", num_retries=3)
        kept.append(asyncio.run(worker.generate_sequences(asked)))
        assert min(server.count for server in servers) > 0
    for other in kept[1:]:
        for name, tensor in kept[0].batch.items():
            assert torch.equal(other.batch[name], tensor), name
    first = kept[0].batch["responses"]
    sampled = kept[0].non_tensor_batch["sampled"]
    turns = [(first[row, :3].tolist(), first[row, 4:7].tolist()) for row in range(len(asked)) if sampled[row] == [3, 3]]
    assert any(one != two for one, two in turns)  # and not the same draws again
    account = kept[2].meta_info["attempts"]
    assert Counter(line["outcome"] for line in account) == {"ok": len(asked), "error": 5}
    assert all(line["turns"] == 2 and line["servers"] for line in account if line["outcome"] == "ok")


def test_rows_whose_attempts_fail_are_dropped(engine: Any) -> None:
    asked = requests()
    asked.non_tensor_batch["extra"][5] = {}
    worker = build_worker(engine, default_agent_loop="twice", on_failure="drop", num_retries=1)
    found = asyncio.run(worker.generate_sequences(asked))
    assert found.non_tensor_batch["__dropped__"].tolist() == [row == 5 for row in range(8)]
    assert found.batch["response_mask"].any(-1).tolist() == [row != 5 for row in range(8)]
    check_rollout(asked, found, step=1, single_turn=False)


class Dying:
    """A server whose process ends with its first request, unless that is an empty prompt."""

    async def generate(self, prompt_ids: list[int], **request: Any) -> TokenOutput:
        if prompt_ids:
            os._exit(1)
        return TokenOutput([7])

    async def abort(self, request_id: str) -> bool:
        return False

    async def health(self, timeout_s: float) -> dict[str, float]:
        return {}


@register("spoilt")
class Spoilt(Twice):
    """Returns what cannot be a row."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        row = kwargs["extra"]["row"]
        changes: list[dict[str, Any]] = [{}, {"response_mask": [1]}, {"prompt_ids": [3] * 13}]
        if row == 3:
            return (output, 1.0)  # type: ignore[return-value]
        if row == 6:
            output.response_ids[-1] = tiny.VOCABULARY
        if row == 0:
            output.extra_fields["lock"] = threading.Lock()
        if row == 5:
            return output.model_copy(update={"response_mask": [0] * len(output.response_ids)})
        return output.model_copy(update=changes[row % 3])


def test_an_output_that_cannot_be_a_row_costs_its_attempt(engine: Any) -> None:
    asked = requests()
    worker = build_worker(engine, default_agent_loop="spoilt", on_failure="drop", num_retries=0)
    asked.non_tensor_batch["extra"][7] = {"row": 9}
    found = asyncio.run(worker.generate_sequences(asked))
    assert found.non_tensor_batch["__dropped__"].tolist() == [row != 7 for row in range(len(asked))]
    reasons = [line["reason"] or "" for line in found.meta_info["attempts"]]
    assert "trajectory 0: extra_fields['lock'] cannot be sent to the trainer (TypeError: cannot pickle" in reasons[0]
    assert "run returned float in its list: it must return an AgentLoopOutput" in reasons[3]
    assert "trajectory 6: response_ids has the token 131; the model's are 0 to 130" in reasons[6]
    assert "trajectory 1: its lists must have one length" in reasons[1]
    assert "trajectory 2: its prompt has 13 tokens, data.max_prompt_length is 12" in reasons[2]
    assert "trajectory 5: none of its " in reasons[5] and "response tokens is sampled" in reasons[5]


def test_a_loop_gets_no_column_that_is_null_in_its_row() -> None:
    asked = requests()
    asked.non_tensor_batch["hint"] = np.array([None, "x"] * 4, dtype=object)
    rows = [AgentLoopWorkerBase._row(None, asked, index) for index in (0, 1)]  # type: ignore[arg-type]
    assert "hint" not in rows[0] and rows[1]["hint"] == "x"


@register("careless")
class Careless(Twice):
    """Changes the columns of its row, and fails the first time."""

    seen: list[Any] = []

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        row, messages = kwargs["extra"]["row"], kwargs["raw_prompt"]
        output = await super().run(sampling_params, **kwargs)
        kwargs["raw_prompt_ids"].append(7)
        kwargs["extra"]["row"] = -1
        messages[0]["content"] += "!"
        messages.append({"role": "assistant", "content": "hello"})
        self.seen.append((row, len(messages), messages[0]["content"]))
        if [each[0] for each in self.seen].count(row) == 1:
            raise RuntimeError("once")
        return output


def test_what_a_loop_changes_in_its_row_reaches_no_other_attempt(engine: Any) -> None:
    """The samples of a prompt share their columns, and so do attempts."""
    asked = requests()
    prompts = [[{"role": "user", "content": str(row // 2)}] for row in range(len(asked))]
    asked.non_tensor_batch["raw_prompt"] = np.fromiter((prompts[row // 2 * 2] for row in range(8)), object, count=8)
    expected = asyncio.run(build_worker(engine, default_agent_loop="twice").generate_sequences(asked))
    Careless.seen.clear()
    worker = build_worker(engine, default_agent_loop="careless", on_failure="retry", num_retries=1)
    found = asyncio.run(worker.generate_sequences(asked))
    assert sorted(Careless.seen) == sorted([(row, 2, f"{row // 2}!") for row in range(8)] * 2)
    for name, tensor in expected.batch.items():
        assert torch.equal(found.batch[name], tensor), name
    assert [row["row"] for row in asked.non_tensor_batch["extra"]] == list(range(8))
    assert [row[0] for row in found.non_tensor_batch["raw_prompt"]] == [prompts[row // 2 * 2][0] for row in range(8)]


def test_requests_of_a_dead_actor_go_to_another_server(engine: Any, ray_cluster: None) -> None:
    asked = requests()
    expected = asyncio.run(build_worker(engine).generate_sequences(asked))
    actor = ray.remote(Dying).options(num_cpus=0).remote()
    asyncio.run(ray_keeps_no_record_of_requests(actor))
    worker = build_worker(engine, [Server(engine), actor])
    found = asyncio.run(worker.generate_sequences(asked))
    for name, tensor in expected.batch.items():
        assert torch.equal(found.batch[name], tensor), name
    moved = [line["servers"] for line in found.meta_info["attempts"] if len(line["servers"]) == 2]
    assert moved and all("rollout server 1 of 2 (actor " in dead and "server 0" in alive for dead, alive in moved)


async def ray_keeps_no_record_of_requests(actor: Any) -> None:
    """Records of such calls would let Ray's state service grow with every step."""
    manager = AsyncLLMServerManager(OmegaConf.create({}), [actor])
    answers = [await manager.generate(name, prompt_ids=[], sampling_params={}) for name in ("one", "two")]
    assert [answer.token_ids for answer in answers] == [[7]] * 2
    await actor.health.remote(1.0)  # an ordinary call
    seen: set[str] = set()
    while "task::Dying.health" not in seen:
        seen = {event["cat"] for event in ray.timeline() if event["cat"].startswith("task::Dying")}
    assert seen <= {"task::Dying.health", "task::Dying.__init__"}


@ToolParser.register("always_calls")
class AlwaysCalls(ToolParser):
    """Finds a call in whatever the model says, since a model with random weights writes none."""

    def parse(self, text: str, tools: Any = ()) -> tuple[str, list[FunctionCall]]:
        return "", [FunctionCall("calculator", '{"expression": "6*7"}')]


@register("short turns")
class ShortTurns(ToolAgentLoop):
    """Ends a turn at about every third token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        return await super().run({**sampling_params, "stop_token_ids": list(range(6, 50))}, **kwargs)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of ASCII whose tokens the tiny model has, with its end and its padding."""
    special = ["<|endoftext|>", "<|system|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    characters = [*map(chr, range(33, 127)), "Ġ"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *characters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = {"pad_token": special[tiny.PAD], "eos_token": special[tiny.EOS], "additional_special_tokens": special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **tokens)


def test_tool_calls_between_sampled_turns(engine: Any, tmp_path: Path) -> None:
    """The engine's log-probabilities of all turns are those of a forward pass over the whole trajectory."""
    path = tmp_path / "tools.yaml"
    path.write_text("tools: [{class_name: verl.tools.calculator_tool.CalculatorTool, config: {type: native}}]")
    turns = {"enable": True, "format": "always_calls", "tool_config_path": path, "max_assistant_turns": 3}
    worker = build_worker(engine, response_length=40, multi_turn=turns, default_agent_loop="short turns")
    worker.tokenizer = small_tokenizer()
    asked = requests()
    prompts = [[{"role": "user", "content": text}] for text in "abcdefgh"]
    asked.non_tensor_batch["raw_prompt"] = np.fromiter(prompts, dtype=object, count=len(asked))
    found = asyncio.run(worker.generate_sequences(asked))
    numbers = [[turn["role"] for turn in row] for row in found.non_tensor_batch[TURNS_COLUMN]]
    assert max(numbers, key=len) == ["assistant", "tool", "assistant", "tool", "assistant"]
    for row, turns_of_row in enumerate(found.non_tensor_batch[TURNS_COLUMN]):
        sampled = {
            place for turn in turns_of_row if turn["role"] == "assistant" for place in range(turn["start"], turn["end"])
        }
        assert found.batch["response_mask"][row].nonzero().flatten().tolist() == sorted(sampled)
    reference = tiny.reference_log_probs(tiny.build_model(), found, tiny.TEMPERATURE)
    torch.testing.assert_close(found.batch["rollout_log_probs"], reference, atol=1e-4, rtol=0)  # fp32, two layers
    again = asyncio.run(worker.generate_sequences(asked))
    assert torch.equal(again.batch["responses"], found.batch["responses"])


def test_rows_of_prompts_that_a_loop_has_changed() -> None:
    asked = tiny.prompts_batch(2)
    outputs = [
        AgentLoopOutput(prompt_ids=[5, 6], response_ids=[7, 8], response_mask=[1, 0], reward_score=0.5),
        AgentLoopOutput(prompt_ids=[4], response_ids=list(range(20)), response_mask=[1] * 20, reward_score=1.0),
    ]
    found = rows_of(outputs, asked, tiny.RESPONSE_LENGTH, tiny.PAD).batch
    width = tiny.PROMPT_LENGTH
    assert found["prompts"].tolist() == [[0] * (width - 2) + [5, 6], [0] * (width - 1) + [4]]
    assert found["responses"].tolist() == [[7, 8] + [0] * 8, list(range(10))]
    assert found["attention_mask"].sum(-1).tolist() == [4, 11]
    assert found["position_ids"][0, width - 2 : width + 2].tolist() == [0, 1, 2, 3]
    # at the last token that the model has sampled
    assert found["rm_scores"].nonzero().tolist() == [[0, 0], [1, 9]] and found["rm_scores"].sum() == 1.5
    assert "rollout_log_probs" not in found
    with pytest.raises(ValueError, match="trajectory 0: its prompt has 13 tokens, data.max_prompt_length is 12"):
        rows_of([AgentLoopOutput(prompt_ids=[3] * 13, response_ids=[], response_mask=[])], asked[:1], 4, 0)
    with pytest.raises(ValueError, match="trajectory 0: its lists must have one length"):
        rows_of([AgentLoopOutput(prompt_ids=[3], response_ids=[1], response_mask=[])], asked[:1], 4, 0)


@pytest.mark.parametrize(
    "text",
    [
        "a: b",
        "- name: x",
        "- 5",
        "[",
        "- {name: 1, _target_: x}",
        "[{name: a, _target_: x.Y}, {name: a, _target_: x.Z}]",
    ],
)
def test_files_that_hold_no_loops(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        read_agent_loops(str(path))
