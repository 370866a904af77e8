"""Scores of the reward model against transformers' own forward pass, one row at a time and without padding."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.workers.roles import reward_cases as cases
from verl.base_config import ConfigError, build_node
from verl.errors import WrongInput
from verl.protocol import DataProto
from verl.workers.config import RewardModelConfig
from verl.workers.rewards.chat_rendering import ChatRenderer
from verl.workers.roles.reward_model import RewardModelWorker

ATOL = 1e-5
COUNT = len(cases.QUESTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reward")
    cases.write_models(root)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """Workers in this process, by their changes."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{folder}/alone"}.items():
            patch.setenv(name, value)
        yield lambda changes: cases.worker(folder, changes)
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(folder: Path, alone: Any) -> dict[int, list[dict[str, Any]]]:
    """All cases, run once for each world size: world -> rank -> case."""
    two = mp.spawn(cases.run_world, (2, folder, str(folder / "store")), nprocs=2, join=False)
    one = cases.score_all(0, 1, folder)
    while not two.join(timeout=120):
        pass
    return {1: [one], 2: [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]}


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    token = AutoModelForTokenClassification.from_pretrained(folder / "token")
    sequence = AutoModelForSequenceClassification.from_pretrained(folder / "sequence")
    return {"token": token.eval(), "sequence": sequence.eval()}


def policy_tokens(row: int) -> list[int]:
    rows = cases.batch([row]).batch
    return rows["input_ids"][0][rows["attention_mask"][0].bool()].tolist()


def rendered(row: int) -> list[int]:
    """The chat in the reward model's own template and tokens, by transformers alone."""
    tokenizer = cases.reward_tokenizer()
    answer = cases.byte_tokenizer().decode(
        [i for i in cases.response_ids(row) if i != cases.byte_tokenizer().eos_token_id]
    )
    chat = [*cases.messages(row), {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)


def cut(ids: list[int], name: str) -> list[int]:
    if len(ids) <= 24 or "cut" not in name:
        return ids
    return {"right": ids[:24], "left": ids[-24:], "middle": ids[:12] + ids[-12:]}[name.rsplit(" ", 1)[-1]]


@torch.no_grad()
def expected(models: dict[str, Any], name: str) -> Tensor:
    """One score per row; a row is run alone and without padding."""
    anew = [cut(rendered(row), name) for row in range(COUNT)]
    rows = anew if name.startswith("anew") else [policy_tokens(row) for row in range(COUNT)]
    if name == "sequence":
        return torch.stack([models["sequence"](input_ids=torch.tensor([ids])).logits[0, 0] for ids in rows])
    return torch.stack([models["token"](input_ids=torch.tensor([ids])).logits[0, -1, 0] for ids in rows])


@pytest.mark.parametrize(
    ("name", "world"), [(n, w) for n in cases.CASES for w in (1, 2) if w == 2 or "ulysses" not in n]
)
def test_scores_are_those_of_transformers(
    results: dict[int, list[dict[str, Any]]], models: dict[str, Any], name: str, world: int
) -> None:
    wanted = expected(models, name)
    assert wanted.std() > 0.05  # scores that could be mistaken for each other would prove little
    last = torch.tensor([len(cases.response_ids(row)) - 1 for row in range(COUNT)])
    for part in results[world]:
        rows, scores, _ = part[name]
        assert scores.shape == (len(rows), cases.RESPONSE) and scores.dtype == torch.float32
        torch.testing.assert_close(scores.gather(1, last[rows].unsqueeze(1))[:, 0], wanted[rows], atol=ATOL, rtol=0)
        assert (scores != 0).sum() == len(rows)
    seen = sorted({row for part in results[world] for row in part[name][0]})
    assert seen == list(range(COUNT))


def test_rows_that_were_cut_are_counted(results: dict[int, list[dict[str, Any]]]) -> None:
    too_long = [len(rendered(row)) > 24 for row in range(COUNT)]
    assert 0 < sum(too_long) < COUNT
    expected = {
        "anew, cut right": {"reward_model/truncated_ratio": sum(too_long) / COUNT},
        "anew": {"reward_model/truncated_ratio": 0.0},
        "padded, micro 1": {},
    }
    for name, told in expected.items():
        _, _, metrics = results[1][0][name]
        assert {key: value for key, value in metrics.items() if not key.startswith("perf/")} == told


def test_padding_and_order_change_nothing(alone: Any) -> None:
    for changes in (cases.MICRO[3] | cases.PACKED, cases.DYNAMIC | cases.ANEW | {"max_length": 60}):
        worker = alone(changes)
        plain = worker.compute_rm_score(cases.batch()).batch["rm_scores"]
        wide = worker.compute_rm_score(cases.batch(more_prompt=7, more_response=5)).batch["rm_scores"]
        torch.testing.assert_close(wide[:, : cases.RESPONSE], plain, atol=1e-6, rtol=0)
        assert not wide[:, cases.RESPONSE :].any()
        order = [5, 0, 7, 2, 4, 1, 6, 3]
        torch.testing.assert_close(
            worker.compute_rm_score(cases.batch(order)).batch["rm_scores"], plain[order], atol=1e-6, rtol=0
        )


def test_a_row_of_padding_scores_zero(alone: Any) -> None:
    data = cases.batch()
    data.batch["attention_mask"][2] = 0
    scores = alone(cases.MICRO[8] | cases.PACKED).compute_rm_score(data).batch["rm_scores"]
    assert not scores[2].any() and scores[[0, 1, 3]].any(-1).all()


def test_a_token_that_the_reward_model_does_not_know(alone: Any) -> None:
    data = cases.batch()
    data.batch["input_ids"][1, -1] = len(cases.reward_tokenizer())
    with pytest.raises(ValueError, match=r"reward_model\.model\.input_tokenizer"):
        alone(cases.MICRO[8]).compute_rm_score(data)


def test_scores_stand_at_the_last_sampled_token(alone: Any) -> None:
    data = cases.batch()
    width = data.batch["responses"].shape[1]
    attended = data.batch["attention_mask"][:, -width:]
    sampled = attended.clone()
    ends = attended.sum(-1) - 1
    sampled[torch.arange(COUNT), ends] = 0  # as if each ended with a token of a tool
    plain = alone(cases.MICRO[8]).compute_rm_score(data).batch["rm_scores"]
    data.batch["response_mask"] = sampled
    moved = alone(cases.MICRO[8]).compute_rm_score(data).batch["rm_scores"]
    torch.testing.assert_close(moved.sum(-1), plain.sum(-1), atol=1e-6, rtol=0)
    assert moved.nonzero()[:, 1].tolist() == (ends - 1).clamp(min=0).tolist()


# ---- re-templating


def switch(**changes: Any) -> ChatRenderer:
    options: dict[str, Any] = {"max_length": None, "truncation": "right"} | changes
    options.setdefault("ends", [cases.byte_tokenizer().eos_token_id])
    return ChatRenderer(cases.byte_tokenizer(), cases.reward_tokenizer(), **options)


def test_chats_are_rendered_by_the_template_of_the_reward_model() -> None:
    tensors, num_cut = switch(max_length=60)(cases.batch())
    tokenizer = cases.reward_tokenizer()
    rows = [
        ids[mask.bool()].tolist() for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"], strict=True)
    ]
    assert num_cut == 0
    assert tokenizer.decode(rows[1]) == "<s>[user] name a colour</s>[assistant] blue</s>"
    assert tokenizer.decode(rows[2]) == "<s>[user] x</s>[assistant] </s>"
    assert tokenizer.decode(rows[7]) == "<s>[user] no</s>[assistant] yes <|tool|></s>"  # other special tokens stay
    assert rows == [rendered(row) for row in range(COUNT)]
    assert (tensors["attention_mask"][:, 1:] <= tensors["attention_mask"][:, :-1]).all()  # padding is on the right
    assert (tensors["input_ids"][tensors["attention_mask"] == 0] == tokenizer.pad_token_id).all()
    assert tensors["position_ids"][2].tolist() == [
        i if i < len(rows[2]) else 0 for i in range(tensors["input_ids"].shape[1])
    ]


def test_any_token_that_ends_a_response_is_taken_off() -> None:
    data = cases.batch([1])
    other = cases.byte_tokenizer().convert_tokens_to_ids("<|tool|>")
    data.batch["responses"][0, 4:6] = other
    data.batch["attention_mask"][0, cases.PROMPT + 5] = 1
    kept, taken = (
        cases.reward_tokenizer().decode(switch(ends=ends)(data)[0]["input_ids"][0]) for ends in ([], [other])
    )
    assert kept.endswith("blue<|tool|><|tool|></s>") and taken.endswith("blue</s>")


def test_what_cannot_be_rendered_is_named() -> None:
    data = cases.batch()
    with pytest.raises(ValueError, match=r"row \d of the batch has \d+ tokens .* reward_model\.max_length is 24"):
        switch(max_length=24, truncation="error")(data)
    data.non_tensor_batch["raw_prompt"][3] = "why?"
    with pytest.raises(TypeError, match="raw_prompt of row 3 must be a list or array of messages, got str"):
        switch()(data)
    data.non_tensor_batch["raw_prompt"][3] = [{"role": "user"}]
    without = cases.batch()
    del without.non_tensor_batch["raw_prompt"]
    for kind in (ValueError, KeyError):
        with pytest.raises(kind, match="^the batch holds no raw_prompt"):
            switch()(without)
    refusing = switch()
    refusing.target.chat_template = "{{ raise_exception('no such turn') if messages | length > 2 else '' }}"
    data.non_tensor_batch["raw_prompt"][4] = cases.messages(0) * 2
    with pytest.raises(ValueError, match="row 4 of the batch, roles .*no such turn"):
        refusing(data)
    with pytest.raises(ValueError, match=r"data\.return_raw_chat=true"):
        switch()(DataProto(batch=data.batch))


# ---- configuration and checkpoints


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "micro_batch_size_per_gpu=null: set micro_batch_size_per_gpu, or use_dynamic_bsz=true"),
        ({"micro_batch_size_per_gpu": 2, "micro_batch_size": 2}, "is deprecated and excludes"),
        ({"micro_batch_size_per_gpu": 2, "truncation": "both"}, "must be one of right, left, middle, error"),
        ({"micro_batch_size_per_gpu": 2, "max_length": 0}, "max_length=0: must be an integer of 1 or more"),
        ({"micro_batch_size_per_gpu": 2, "model_type": "ranking"}, "must be one of discriminative, generative"),
        ({"micro_batch_size_per_gpu": 2, "ulysses_sequence_parallel_size": 2}, "use_remove_padding=true"),
        ({"micro_batch_size_per_gpu": 2, "strategy": "deepspeed"}, "must be one of fsdp, fsdp2, megatron"),
    ],
)
def test_wrong_nodes_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_node(cases.node(tmp_path, changes), RewardModelConfig)


def test_a_model_without_a_score_is_refused(folder: Path, alone: Any) -> None:
    """A head that was made up would give numbers that mean nothing."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

    config = Qwen2Config.from_pretrained(folder / "token")
    Qwen2ForCausalLM(config).save_pretrained(folder / "causal")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model, the first is 'score\.weight'"):
        alone(cases.MICRO[1] | {"model.path": "causal"})
    Qwen2ForCausalLM(config).save_pretrained(folder / "pickled")
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save(Qwen2ForCausalLM(config).state_dict(), folder / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model, the first is 'score\.weight'"):
        alone(cases.MICRO[1] | {"model.path": "pickled"})
    config.num_labels = 2
    Qwen2ForTokenClassification(config).save_pretrained(folder / "two")
    with pytest.raises(ValueError, match=r"score\.(weight|bias)"):
        alone(cases.MICRO[1] | {"model.path": "two"})


def test_both_names_of_the_mesh_lead_to_the_worker(alone: Any) -> None:
    worker: RewardModelWorker = alone(cases.MICRO[1])
    for mesh in ("reward", "reward_model"):
        assert worker._query_dispatch_info(mesh) == 0 and worker._query_collect_info(mesh) is True


# ---- a generative reward model

FUNCTIONS = """
def preprocess(rollout_question, rollout_response, ground_truth):
    if ground_truth == "raise":
        raise KeyError("no such truth")
    if ground_truth == "messages":
        return [{"role": "system", "content": "judge"}, {"role": "user", "content": rollout_response}]
    return f"{rollout_question} | {rollout_response} | {ground_truth}"


def postprocess(text):
    if sum(map(ord, text)) % 5 == 0:
        return "nonsense"
    return len(text) / 10 + ord(text[0])
"""
ANSWER = 6


@pytest.fixture(scope="module")
def judge_folder(folder: Path) -> Path:
    from examples.tiny_model import make_tiny_model

    cases.write_judge(folder, make_tiny_model(str(folder / "judge")), FUNCTIONS)
    return folder


def judge(**changes: Any) -> dict[str, Any]:
    """Return the node of a generative reward model."""
    options = {"model_type": "generative", "name": "hf", "dtype": "float32", "response_length": ANSWER}
    functions = {"data_processor_config": {"path": "functions.py"}}
    return cases.ANEW | {"model.path": "judge"} | options | functions | changes


def truths(data: DataProto, changed: dict[int, str]) -> DataProto:
    rows = [{"style": "model", "ground_truth": changed.get(row, f"t{row}")} for row in range(len(data))]
    data.non_tensor_batch["reward_model"] = np.fromiter(rows, dtype=object, count=len(rows))
    return data


@torch.no_grad()
def judged_by_hand(folder: Path, text: str | list[dict[str, str]]) -> float | None:
    """One row, generated by transformers alone: the score, None where there is none."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder / "judge"),
        AutoModelForCausalLM.from_pretrained(folder / "judge"),
    )
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False)
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    functions: dict[str, Any] = {}
    exec(FUNCTIONS, functions)
    value = functions["postprocess"](answer)
    return value if isinstance(value, float) else None


POOL = {"enable_resource_pool": True, "n_gpus_per_node": 1, "nnodes": 1}


@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=pytest.mark.full)])
def test_scores_of_a_generative_model_are_read_from_what_it_writes(
    judge_folder: Path, alone: Any, caplog: Any, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "sglang":
        pytest.importorskip("sglang")
        request.getfixturevalue("ray_cluster")
    own = POOL | {"name": engine, "tensor_model_parallel_size": 1, "max_num_seqs": 8, "prompt_length": 200}
    worker = alone(judge(scoring={"failure_score": -3.0}, **({} if engine == "hf" else own)))
    data = truths(cases.batch(), {4: "raise", 5: "messages"})
    caplog.set_level("WARNING")
    output = worker.compute_rm_score(data)
    texts = [answer[: cases.RESPONSE] if row == 3 else answer for row, answer in enumerate(cases.ANSWERS)]  # no room
    asked: list[Any] = [f"{cases.QUESTIONS[row]} | {texts[row]} | t{row}" for row in range(COUNT)]
    asked[5] = [{"role": "system", "content": "judge"}, {"role": "user", "content": cases.ANSWERS[5]}]
    wanted = [None if row == 4 else judged_by_hand(judge_folder, asked[row]) for row in range(COUNT)]
    assert 1 < wanted.count(None) < COUNT - 2
    got = output.batch["rm_scores"].sum(-1)
    assert got.tolist() == pytest.approx([-3.0 if value is None else value for value in wanted], rel=1e-6)
    metrics = output.meta_info["metrics"]
    assert metrics["reward_model/failed_ratio"] == wanted.count(None) / COUNT
    assert metrics["reward_model/truncated_ratio"] == 0 and 0 <= metrics["reward_model/unfinished_ratio"] <= 1
    (message,) = [record.getMessage() for record in caplog.records if "data_processor_config" in record.getMessage()]
    assert message.startswith(
        "preprocess of reward_model.data_processor_config failed for row 4, which gets reward_model.scoring.fail"
    )
    order = [5, 0, 7, 2, 4, 1, 6, 3]
    moved = worker.compute_rm_score(data.select_idxs(order)).batch["rm_scores"]
    assert torch.equal(moved, output.batch["rm_scores"][order])
    if engine == "sglang":
        worker.judge.rollout.shutdown()


def test_a_long_question_is_cut_at_its_beginning_and_sampling_repeats(judge_folder: Path, alone: Any) -> None:
    sampled = {"sampling_config": {"do_sample": True, "temperature": 1.0}, "prompt_length": 24}
    first, second = (alone(judge(**sampled)).compute_rm_score(truths(cases.batch(), {})) for _ in range(2))
    assert first.meta_info["metrics"]["reward_model/truncated_ratio"] > 0
    torch.testing.assert_close(first.batch["rm_scores"], second.batch["rm_scores"], rtol=0, atol=0, equal_nan=True)
    everything_fails = alone(judge()).compute_rm_score(truths(cases.batch(), dict.fromkeys(range(COUNT), "raise")))
    assert everything_fails.meta_info["metrics"]["reward_model/failed_ratio"] == 1.0
    unknown = everything_fails.batch["rm_scores"]  # the trainer knows the lowest score of the batch
    assert unknown.isnan().any(-1).all() and not unknown.nan_to_num().any()
    strict = alone(judge(scoring={"max_failed_ratio": 0.9}))
    with pytest.raises(ValueError, match=rf"could not score {COUNT} of {COUNT} .*ratio=0\.9; .*no such truth"):
        strict.compute_rm_score(truths(cases.batch(), dict.fromkeys(range(COUNT), "raise")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "vllm"}, "reward_model.enable_resource_pool=true, or write hf"),
        ({"name": "sglang"}, "reward_model.enable_resource_pool=true, or write hf"),
        ({"name": "trt"}, "must be one of vllm, sglang, hf"),
        ({"response_length": 0}, "response_length=0: must be 1 or more"),
        ({"model.input_tokenizer": None}, "must name the policy's tokenizer"),
        ({"data_processor_config": {}}, "is missing: write the Python file"),
        ({"sampling_config": {"temperature": -1.0}}, "must be a number of 0 or more"),
    ],
)
def test_wrong_nodes_of_a_generative_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_node(cases.node(tmp_path, judge(**changes)), RewardModelConfig)


def test_the_template_of_a_model_that_the_run_downloads_is_tried(
    alone: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks before the start cannot read it."""
    shutil.copytree(folder / "token", folder / "broken")
    tokenizer = cases.reward_tokenizer()
    tokenizer.chat_template = "{{ range( }}"
    tokenizer.save_pretrained(folder / "broken")
    monkeypatch.setattr("verl.workers.roles.reward_model.cached_folder", lambda path: None)
    with pytest.raises(WrongInput, match="the chat template is not valid Jinja"):
        alone(cases.MICRO[1] | cases.ANEW | {"model.path": "broken"})
