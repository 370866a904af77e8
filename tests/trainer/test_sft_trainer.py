"""The supervised trainer: its loss against plain transformers, resume, two processes, and what is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_with_min_lr_schedule_with_warmup

from examples.data_preprocess.gsm8k import solve, synthetic_tables
from examples.tiny_model import make_tiny_model
from tests.utils.checkpoint.killed import SAVE, kill_in
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.run.resume import batches_after
from verl.trainer.sft import trainer as sft
from verl.trainer.sft.checkpoint import CheckpointHandler
from verl.trainer.sft.preflight import check_checkpoint
from verl.trainer.sft_trainer import SFTTrainer, padded_batch
from verl.utils import envs
from verl.utils.checkpoint import verify_checkpoint
from verl.utils.checkpoint.files import Manifest, write_text, write_tracker_atomically
from verl.utils.dataset.factory import SeededRandomSampler
from verl.utils.dataset.loader import stateful_loader
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTTensorCollator
from verl.utils.observe.record import read_entries
from verl.utils.report.compare import compare_runs
from verl.utils.reward_score import default_compute_score

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital'")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("model")), hidden_size=32, num_layers=1)


@pytest.fixture(scope="module")
def divisible(tmp_path_factory):
    """A model whose heads and layers two workers can share."""
    return make_tiny_model(str(tmp_path_factory.mktemp("divisible")), hidden_size=128, num_layers=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("data")
    tables = synthetic_tables()
    for name, rows in (("train", tables["sft_train"][:20]), ("val", tables["sft_test"][:5])):
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture
def options(model, files, tmp_path):
    """Return the overrides of a run of two epochs of five steps."""
    return [
        f"model.path={model}",
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/val.parquet",
        "data.train_batch_size=4",
        "data.max_length=64",
        "model.use_remove_padding=true",
        "optim.lr=1e-2",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        "trainer.logger=[file]",
        "trainer.report=false",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
    ]


def build(options, *more, name="sft_trainer_engine"):
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose(name, [*options, *more])


def run(options, monkeypatch, log: Path, *more):
    """Train in this process; returns the metrics of each step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    trainer = SFTTrainer(build(options, *more))
    trainer.fit()
    return trainer, read(log)


def read(log: Path):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    untimed = [{key: value for key, value in line["data"].items() if key != "train/mfu"} for line in lines]
    return {line["step"]: data for line, data in zip(lines, untimed, strict=True)}


def reference_loss(path, rows):
    """Return the mean negative log-likelihood of what the assistant says, one row at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    total, count = 0.0, 0
    for row in rows:
        ids, learnt = [], []
        texts = [message["content"] for message in row["messages"]]
        for question, answer in zip(texts[::2], texts[1::2], strict=True):
            ids += tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>")
            response = tokenizer.encode(f"{answer}<|end|>")
            learnt += range(len(ids), len(ids) + len(response))
            ids += response
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(log_probs[at - 1, ids[at]].item() for at in learnt)
        count += len(learnt)
    return total / count


def test_synthetic_sums_are_right_and_test_questions_are_unseen():
    tables = synthetic_tables()
    assert {name: len(rows) for name, rows in tables.items()} == {
        "train": 4096,
        "test": 256,
        "sft_train": 8192,
        "sft_test": 256,
    }
    test_questions = {row["extra_info"]["question"] for row in tables["test"]}
    assert len(test_questions) == 256
    assert not test_questions & {row["extra_info"]["question"] for row in tables["train"]}
    assert not test_questions & {row["messages"][0]["content"] for row in tables["sft_train"]}
    for row in tables["train"][:500]:
        left, right = row["prompt"][0]["content"].removesuffix("=?").split("+")
        assert row["reward_model"]["ground_truth"] == str(int(left) + int(right))
        solution = row["extra_info"]["answer"]
        assert default_compute_score(row["data_source"], solution, row["reward_model"]["ground_truth"]) == 1.0
    assert solve((47, 35)) == "7+5=12 4+3+1=8 #### 82"
    assert solve((47, 35), careless=True) == "7+5=12 4+3+0=7 #### 72"
    assert solve((41, 35), careless=True) == solve((41, 35))
    assert synthetic_tables() == tables and synthetic_tables(seed=1) != tables


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_padded_batch(model, files, pad_mode):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = {"pad_mode": pad_mode, "max_length": 64}
    dataset = MultiTurnSFTDataset(str(files / "val.parquet"), tokenizer, config)
    batch = padded_batch(SFTTensorCollator(pad_mode)([dataset[i] for i in range(3)]), tokenizer.pad_token_id).batch
    single = MultiTurnSFTDataset(str(files / "val.parquet"), tokenizer, {"pad_mode": "no_padding"})
    rows = [single[i] for i in range(3)]
    width = max(len(row["input_ids"]) for row in rows)
    assert batch["input_ids"].shape == (3, width) and batch["responses"].shape == (3, width - 1)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        assert batch["input_ids"][i, :size].tolist() == row["input_ids"].tolist()
        assert batch["attention_mask"][i].tolist() == [1] * size + [0] * (width - size)
        assert batch["position_ids"][i].tolist() == list(range(size)) + [0] * (width - size)
        learnt = batch["responses"][i][batch["response_mask"][i].bool()]
        assert learnt.tolist() == row["input_ids"][row["loss_mask"].bool()].tolist()


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("data.use_dynamic_bsz=false", "model.use_remove_padding=false", "data.pad_mode=right"),
    ],
)
def test_loss_equals_transformers_and_the_export_holds_what_was_learnt(
    options, monkeypatch, tmp_path, files, model, more
):
    import datasets

    rows = datasets.Dataset.from_parquet(str(files / "val.parquet"), cache_dir=str(tmp_path / "cache")).to_list()
    export = ("trainer.save_freq=100", "trainer.test_freq=after_each_epoch", "checkpoint.save_contents=[hf_model]")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    trainer = SFTTrainer(build(options, *export, *more))
    assert trainer.validate() == pytest.approx(reference_loss(model, rows), abs=1e-5)
    trainer.fit()
    metrics = read(tmp_path / "log.jsonl")
    assert list(metrics) == list(range(1, 11))
    assert sorted(step for step, values in metrics.items() if "val/loss" in values) == [5, 10]
    assert metrics[10]["val/loss"] < metrics[5]["val/loss"] < reference_loss(model, rows) - 0.5
    exported = tmp_path / "checkpoints" / "global_step_10" / "huggingface"
    assert reference_loss(str(exported), rows) == pytest.approx(metrics[10]["val/loss"], abs=1e-5)
    assert metrics[1]["train/lr"] == 1e-2 and metrics[1]["train/grad_norm"] > 0
    assert metrics[2]["train/total_tokens(B)"] * 1e9 == pytest.approx(
        metrics[1]["train/global_tokens"] + metrics[2]["train/global_tokens"]
    )


def opened_alike(options, files, folder):
    """Write the rows with two opening turns before them in turn; return the options, and the rows of validation."""
    import datasets

    def opened(row, at):
        turns = ["27+5=?", "#### 32"] if at % 2 else ["40+9=?", "#### 49"]
        roles = zip(("user", "assistant"), turns, strict=True)
        return [{"role": role, "content": text} for role, text in roles] + row["messages"]

    for name in ("train", "val"):
        rows = datasets.Dataset.from_parquet(str(files / f"{name}.parquet"), cache_dir=str(folder / "cache")).to_list()
        rows = [{"messages": opened(row, at)} for at, row in enumerate(rows)]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    data = [f"data.{name}_files={folder}/{name}.parquet" for name in ("train", "val")]
    return [*options, *data, "data.max_length=96"], rows


@pytest.mark.parametrize(
    ("cut", "spared"), [((), 6), (("data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=4"), 5)]
)
def test_rows_that_open_alike_share_their_turns(options, monkeypatch, tmp_path, files, model, cut, spared):
    """The answer of a common turn is learnt once for each row, and computed once for all rows of a micro-batch.

    Two openings, both 18 tokens with the one that begins the next turn, stand before 8 rows in one micro-batch or two.
    """
    options, rows = opened_alike(options, files, tmp_path)
    options += ["data.train_batch_size=8", "trainer.total_training_steps=4", *cut]
    runs = []
    for shares in (False, True):
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{shares}.jsonl"))
        folder = f"trainer.default_local_dir={tmp_path}/{shares}"
        settings = build(options, folder, f"model.use_prefix_sharing={shares}", "trainer.test_freq=2")
        trainer = SFTTrainer(settings)
        assert trainer.validate() == pytest.approx(reference_loss(model, rows), abs=1e-5)
        trainer.fit()
        runs.append(read(tmp_path / f"{shares}.jsonl"))
    plain, shared = runs
    assert list(plain) == list(shared) == [1, 2, 3, 4] and "val/loss" in plain[4]
    for step, values in shared.items():
        assert values.pop("train/computed_tokens") <= values["train/global_tokens"] - spared * 18
        assert values == pytest.approx(plain[step], rel=1e-5)
    assert plain[4]["train/loss"] < plain[1]["train/loss"] - 0.5


def test_the_older_tree_trains_on_columns_of_text(options, monkeypatch, tmp_path, files, model):
    """Question and answer columns give the loss of the same rows as messages."""
    import datasets

    rows = datasets.Dataset.from_parquet(str(files / "val.parquet"), cache_dir=str(tmp_path / "cache")).to_list()
    pairs = [{"question": m[0]["content"], "answer": m[1]["content"]} for m in (row["messages"] for row in rows)]
    datasets.Dataset.from_list(pairs).to_parquet(tmp_path / "pairs.parquet")
    moved = {"model.path": "model.partial_pretrain", "model.use_remove_padding": "use_remove_padding"}
    older = [f"{moved.get(key, key)}={value}" for key, _, value in (option.partition("=") for option in options)]
    older += [f"data.{name}_files={tmp_path}/pairs.parquet" for name in ("train", "val")]
    older += ["data.micro_batch_size_per_gpu=2", "trainer.total_training_steps=1", "trainer.test_freq=1"]
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    trainer = SFTTrainer(build(older, name="sft_trainer"))
    before = trainer.validate()
    assert before == pytest.approx(reference_loss(model, rows), abs=1e-5)
    trainer.fit()
    assert read(tmp_path / "log.jsonl")[1]["val/loss"] < before


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(options, monkeypatch, tmp_path, caplog):
    unread = "+data.apply_chat_template_kwargs.enable_thinkng=true"
    whole = run(options, monkeypatch, tmp_path / "whole.jsonl", unread)[1]
    assert caplog.text.count("the chat template does not read enable_thinkng=true: without effect") == 1
    folder = f"trainer.default_local_dir={tmp_path}/stopped"
    run(options, monkeypatch, tmp_path / "first.jsonl", folder, "trainer.save_freq=3", "trainer.total_training_steps=7")
    assert (tmp_path / "stopped" / "latest_checkpointed_iteration.txt").read_text() == "7"
    resumed = run(options, monkeypatch, tmp_path / "rest.jsonl", folder, "trainer.report=true")[1]
    assert list(resumed) == [8, 9, 10]
    records = compare_runs(tmp_path / "checkpoints", tmp_path / "stopped")
    assert records.steps == tuple(range(1, 11)) and records.by_digests and records.difference is None
    check_record(tmp_path / "stopped", saved=(3, 6, 7))
    from_path = f"trainer.resume_from_path={tmp_path}/stopped/global_step_3"
    middle = run(options, monkeypatch, tmp_path / "middle.jsonl", from_path, "trainer.resume_mode=resume_path")[1]
    assert list(middle) == [4, 5, 6, 7, 8, 9, 10]
    assert compare_runs(tmp_path / "checkpoints", tmp_path / "stopped").difference is None
    other = run(options, monkeypatch, tmp_path / "other.jsonl", "optim.lr=2e-2", "trainer.total_training_steps=1")[1]
    assert list(other) == [1]
    difference = compare_runs(tmp_path / "checkpoints", tmp_path / "stopped").difference
    assert (difference.step, difference.phase) == (1, "weights")
    for part in (resumed, middle):
        for step, values in part.items():
            for key in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens", "train/total_tokens(B)"):
                assert values[key] == whole[step][key], (step, key)


def test_a_resume_takes_changed_settings_and_refuses_another_model(options, monkeypatch, tmp_path, caplog):
    """An extended run has the rates of one that had the new values from the start, or of the old ones on request."""
    options = [*options, "trainer.save_freq=3", "trainer.test_freq=-1"]
    run(options, monkeypatch, tmp_path / "first.jsonl", "trainer.total_training_steps=3", "optim.lr_warmup_steps=4")
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    shape = ["optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.1", "trainer.total_training_steps=6"]
    changed = ["optim.lr=3e-2", "optim.weight_decay=0.2", "optim.betas=[0.8,0.95]", "optim.lr_warmup_steps=2", *shape]
    resumed = run(options, monkeypatch, tmp_path / "new.jsonl", *changed)[1]
    told = ["lr=0.03, and was 0.01", "weight_decay=0.2, and was 0.01", "betas=[0.8,0.95], and was [0.9,0.999]"]
    told += ["lr_warmup_steps=2, and was 4", "lr_scheduler_type=cosine, and was constant"]
    assert all(f"optim.{text} in the checkpoint" in caplog.text for text in told)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-2)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, 6, min_lr_rate=0.1)
    for step in range(1, 7):
        if step > 3:
            assert resumed[step]["train/lr"] == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        schedule.step()
    kept = [f"trainer.default_local_dir={tmp_path}/kept", "optim.use_checkpoint_opt_param_scheduler=true"]
    resumed = run(options, monkeypatch, tmp_path / "old.jsonl", *changed, *kept)[1]
    assert [resumed[step]["train/lr"] for step in (4, 5, 6)] == [pytest.approx(rate) for rate in (0.0075, 0.01, 0.01)]
    with pytest.raises(ValueError, match="another model: this run's has rms_norm_eps=0.001, and 1e-06 in"):
        run(options, monkeypatch, tmp_path / "other.jsonl", "+model.override_config.rms_norm_eps=1e-3")


def test_a_run_on_a_cpu_keeps_the_memory_of_its_steps(options, monkeypatch):
    kept = []
    monkeypatch.setattr(sft, "keep_freed_host_memory", lambda: kept.append(True))
    monkeypatch.setattr(sft, "SFTTrainer", lambda config: SimpleNamespace(fit=lambda: kept.append("fit")))
    sft.run_sft(build(options))
    assert kept == [True, "fit"]


@pytest.mark.parametrize(
    ("engine", "given", "queues"), [("fsdp", None, None), ("megatron", None, "1"), ("megatron", "8", "8")]
)
def test_megatron_alone_has_one_queue_of_kernels(options, monkeypatch, engine, given, queues):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")  # so that it is reset after the test
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    seen = []
    monkeypatch.setattr(sft, "keep_freed_host_memory", lambda: None)
    reads = SimpleNamespace(fit=lambda: seen.append(envs.read("CUDA_DEVICE_MAX_CONNECTIONS")))
    monkeypatch.setattr(sft, "SFTTrainer", lambda config: reads)
    sft.run_sft(build(options, f"engine={engine}", f"optim={engine}"))
    assert seen == [queues]


def handler(folder, rank, ranks, rows=8):
    """Return the checkpoints of one data-parallel rank, whose engine holds nothing."""
    dataset = list(range(40))
    engine = SimpleNamespace(
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_size=lambda: ranks,
        is_mp_src_rank_with_outputs=lambda: True,
        save_checkpoint=lambda **_: None,
        load_checkpoint=lambda folder: None,
        finish_checkpoint=lambda wait: True,
        keep_latest_checkpoints=lambda folder, keep: None,
    )
    sampler = SeededRandomSampler(dataset, 1, rank=rank, num_replicas=ranks)
    loader = stateful_loader(dataset, batch_size=rows // ranks, sampler=sampler, drop_last=True, collate_fn=list)
    return CheckpointHandler(engine, loader, default_local_dir=str(folder))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_other_data_parallel_ranks_resume_at_the_same_row(before, after, tmp_path, caplog):
    """As with another layout of Megatron-Core or of sequence parallelism, which reads the same weights."""
    whole = list(handler(tmp_path, 0, 1).train_dataloader)
    for rank in range(before):
        saver = handler(tmp_path, rank, before)
        iterator = iter(saver.train_dataloader)
        for _ in range(2):
            next(iterator)
        saver.save_checkpoint(2)
    resumed = [handler(tmp_path, rank, after) for rank in range(after)]
    assert [each.load_checkpoint() for each in resumed] == [2] * after
    rest = [sorted(sum(parts, [])) for parts in zip(*(each.train_dataloader for each in resumed), strict=True)]
    assert rest == [sorted(batch) for batch in whole[2:]]
    assert "train_batch_size" not in caplog.text
    handler(tmp_path, 0, 1, rows=16).load_checkpoint()
    assert "data.train_batch_size=16, and was 8 in the checkpoint" in caplog.text

    (tmp_path / "global_step_2" / "run_state.json").write_text("{}")  # as an older version wrote it
    with pytest.raises(ValueError, match=rf"older version with {before} data-parallel ranks.*this run has {after}"):
        handler(tmp_path, 0, after).load_checkpoint()


@pytest.mark.parametrize("name", ["data_0.pt", "run_state.json"])
def test_the_data_of_another_step_is_refused(tmp_path, name):
    for step in (1, 2):
        handler(tmp_path, 0, 1).save_checkpoint(step)
    assert handler(tmp_path, 0, 1).load_checkpoint() == 2
    shutil.copy(tmp_path / "global_step_1" / name, tmp_path / "global_step_2")
    with pytest.raises(ValueError, match=rf"{name} was saved at step 1: copy the file of step 2 back"):
        handler(tmp_path, 0, 1).load_checkpoint()


def test_a_checkpoint_that_no_tracker_names_is_not_replaced(tmp_path, caplog):
    for step in (1, 2):
        handler(tmp_path, 0, 1).save_checkpoint(step)
        Manifest(1, 0, step).write(tmp_path / f"global_step_{step}")
        write_text(tmp_path / f"global_step_{step}", "fsdp_config.json", '{"world_size": 1}')
    check_checkpoint("auto", None, str(tmp_path))
    assert not caplog.records
    check_checkpoint("auto", str(tmp_path / "global_step_1"), str(tmp_path))
    check_checkpoint("disable", None, str(tmp_path))
    check_checkpoint("disable", None, str(tmp_path), tells=False)  # another rank
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2 and "(global_step_2): the run starts after step 1" in named[0]
    assert "(global_step_1, global_step_2): the run starts from scratch" in named[1]
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for content in (None, "7"):  # no tracker, and one of a checkpoint that is gone
        tracker.unlink()
        if content is not None:
            tracker.write_text(content)
        for start in (lambda: check_checkpoint("auto", None, str(tmp_path)), handler(tmp_path, 0, 1).load_checkpoint):
            with pytest.raises(ValueError, match="names no checkpoint, but .*global_step_2 is complete"):
                start()
        if content is None:
            tracker.touch()
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    for start in (lambda: check_checkpoint("auto", None, str(tmp_path)), handler(tmp_path, 0, 1).load_checkpoint):
        with pytest.raises(ValueError, match="the checkpoint that .*iteration.txt names does not exist: copy it back"):
            start()
    check_checkpoint("disable", None, str(tmp_path))


def test_a_run_that_dies_before_its_first_save_goes_on_where_it_has_started(tmp_path):
    """Newer checkpoints are those that its user has decided to replace."""
    root = tmp_path / "run"
    for step in (1, 2):
        handler(root, 0, 1).save_checkpoint(step)
        Manifest(1, 0, step).write(root / f"global_step_{step}")
        write_text(root / f"global_step_{step}", "fsdp_config.json", '{"world_size": 1}')
    older = replace(handler(root, 0, 1), resume_from_path=str(root / "global_step_1"))
    assert older.load_checkpoint() == 1  # and the run dies
    assert handler(root, 0, 1).load_checkpoint() == 1
    shutil.copytree(root / "global_step_2", tmp_path / "global_step_2")
    for change in ({"resume_mode": "disable"}, {"resume_from_path": str(tmp_path / "global_step_2")}):
        write_tracker_atomically(root, 2)
        replace(handler(root, 0, 1), **change).load_checkpoint()
        with pytest.raises(ValueError, match="names no checkpoint, but .*global_step_2 is complete"):
            handler(root, 0, 1).load_checkpoint()


def test_the_next_complete_checkpoint_removes_those_of_killed_saves_and_names_them(tmp_path, caplog):
    for step in (2, 4):
        kill_in(SAVE, tmp_path / f"global_step_{step}")
    (tmp_path / "global_step_6" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_8.tar.gz").touch()
    (tmp_path / "global_step_7").touch()  # in the place of a checkpoint
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.mkdir()
    handler(tmp_path, 0, 1).save_checkpoint(7)
    left = {path.name for path in tmp_path.glob("global_step_*")}
    assert left == {f"global_step_{name}" for name in ("6", "7", "7.aside.1", "8.tar.gz", "x")}
    assert tracker.read_text() == "7"
    (told,) = [record.getMessage() for record in caplog.records if "that a killed run had left" in record.getMessage()]
    assert told.endswith(f": {tmp_path}/global_step_2, {tmp_path}/global_step_4")
    assert {path.name for path in (tmp_path / "global_step_7").iterdir()} == {"data_0.pt", "run_state.json"}


def test_a_state_of_the_loader_with_a_wrong_value_is_refused_by_the_name_of_its_file(tmp_path):
    saver = handler(tmp_path, 0, 1)
    next(iter(saver.train_dataloader))
    saver.save_checkpoint(1)
    path = tmp_path / "global_step_1" / "data_0.pt"
    good = torch.load(path, weights_only=False)
    for wrong in ([], {"x": 1}, good | {"_num_yielded": "x"}, good | {"_sampler_iter_state": {}}):
        torch.save(wrong, path)
        resumed = handler(tmp_path, 0, 1)
        with pytest.raises(Exception) as caught:
            resumed.load_checkpoint()
            next(batches_after(resumed.restored_from, resumed.train_dataloader))
        assert str(path) in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]x",
        "3",
        '["a"]',
        '{"step": "1"}',
        '{"total_tokens": null}',
        '{"total_tokens": -1}',
        '{"total_tokens": 1.5}',
    ]
    + ['{"data_parallel_size": "x"}', '{"train_batch_size": [8]}', '{"data_parallel_size": true}'],
)
def test_damaged_counters_are_refused_by_the_name_of_their_file(tmp_path, content):
    handler(tmp_path, 0, 1).save_checkpoint(1)
    path = tmp_path / "global_step_1" / "run_state.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} cannot be restored"):
        handler(tmp_path, 0, 1).load_checkpoint()


class Curriculum:
    """The state of a data set of the user's."""


def test_a_resume_refuses_another_checkpoint_and_names_other_data(options, monkeypatch, tmp_path, files, caplog):
    import pyarrow.parquet as pq

    saved = ("trainer.total_training_steps=1", "trainer.save_freq=1")
    run(options, monkeypatch, tmp_path / "log.jsonl", *saved)
    folder = tmp_path / "checkpoints" / "global_step_1"
    table = pq.read_table(files / "train.parquet")
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), tmp_path / "train.parquet")
    other = f"data.train_files={tmp_path}/train.parquet"
    for more, warns in (((), False), ((other,), True)):
        resumed = SFTTrainer(build(options, *more))
        assert resumed.checkpoints.load_checkpoint() == 1
        assert ("data.train_files: the rows, their order" in caplog.text) == warns
    state = (folder / "data_0.pt").read_bytes()
    torch.save({"dataset": Curriculum()}, folder / "data_0.pt")
    name = f"{__name__}.Curriculum"
    with pytest.raises(ValueError, match=rf"data_0\.pt names {name}.*trainer\.trusted_classes=\[{name}\]"):
        resumed.checkpoints.load_checkpoint()
    (folder / "data_0.pt").unlink()
    with pytest.raises(ValueError, match=r"data_0\.pt is missing: .* Copy it back, or set"):
        resumed.checkpoints.load_checkpoint()
    (folder / "data_0.pt").write_bytes(state)
    folder.rename(folder.with_name("global_step_3"))
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ValueError, match="it was saved at step 1, the folder's name says 3"):
        resumed.checkpoints.load_checkpoint()


def check_record(folder, saved):
    """Hold the record of a run to what its metrics say, and its report to the pictures of supervised training."""
    entries = read_entries(folder / "metrics.jsonl")
    assert [step for step, entry in entries.items() if "timing_s/save_checkpoint" in entry["data"]] == list(saved)
    for entry in entries.values():
        data, (worker,) = entry["data"], entry["workers"]["trainer"]
        assert data["perf/throughput"] == pytest.approx(data["train/global_tokens"] / data["timing_s/step"])
        assert data["timing_s/train_batch"] == data["timing_s/step"] and data["timing_s/record"] > 0
        assert worker["seconds"]["train_batch"] == data["timing_s/step"] and worker["memory"]["host_gb"] > 0.1
        assert list(entry["phases"]) == ["batch", "weights", "random state"]
    page = (folder / "report.html").read_text()
    assert all(f'<figure id="{name}">' in page for name in ("loss", "gradient", "times", "throughput", "memory"))


MEGATRON = ["engine=megatron", "optim=megatron"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, resumes",
    [
        pytest.param(["engine.strategy=fsdp2"], False, marks=pytest.mark.full),
        ([*MEGATRON, "engine.tensor_model_parallel_size=2"], False),
        pytest.param([*MEGATRON, "engine.pipeline_model_parallel_size=2"], True, marks=pytest.mark.full),
        pytest.param([*MEGATRON, "engine.context_parallel_size=2"], True, marks=pytest.mark.full),
        pytest.param(MEGATRON, True, marks=pytest.mark.full),
    ],
    ids=["fsdp2", "megatron tp", "megatron pp", "megatron cp", "megatron dp"],
)
def test_two_processes_train_as_one(options, divisible, monkeypatch, tmp_path, layout, resumes):
    """Whatever shares the work, down to the resumed second half; Megatron-Core decays no norms, so nothing is."""
    if layout[0] == MEGATRON[0]:
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    options = [*options, f"model.path={divisible}", "trainer.test_freq=5", "optim.weight_decay=0"]
    alone = run(options, monkeypatch, tmp_path / "one.jsonl")[1]
    folder, log = f"trainer.default_local_dir={tmp_path}/two", tmp_path / "two.jsonl"
    first = ["trainer.total_training_steps=5", "trainer.save_freq=5"] if resumes else []
    both = {}
    for part in filter(None, (first, ["trainer.total_training_steps=10"])):
        start_two([*options, *layout, *part, folder, f"hydra.run.dir={tmp_path}/hydra"], log)
        both |= read(log)
        log.unlink()
    assert list(both) == list(alone)
    assert [each["rank"] for each in read_entries(tmp_path / "two/metrics.jsonl")[10]["workers"]["trainer"]] == [0, 1]
    for step, values in alone.items():
        for key, value in values.items():
            assert both[step][key] == pytest.approx(value, rel=1e-4), (step, key)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [["engine.tensor_model_parallel_size=2"], ["engine.pipeline_model_parallel_size=2"], []]
)
def test_rows_that_open_alike_share_their_turns_on_megatron(options, divisible, files, monkeypatch, tmp_path, layout):
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    options, _ = opened_alike([*options, f"model.path={divisible}", "optim.weight_decay=0"], files, tmp_path)
    options += ["data.train_batch_size=8", "trainer.total_training_steps=4"]
    alone = run(options, monkeypatch, tmp_path / "one.jsonl", "trainer.test_freq=2")[1]
    log = tmp_path / "two.jsonl"
    more = ["model.use_prefix_sharing=true", "trainer.test_freq=2", f"trainer.default_local_dir={tmp_path}/two"]
    start_two([*options, *MEGATRON, *layout, *more, f"hydra.run.dir={tmp_path}/hydra"], log)
    shared = read(log)
    assert list(shared) == list(alone) == [1, 2, 3, 4]
    for step, values in shared.items():
        spared = values["train/global_tokens"] - values.pop("train/computed_tokens")
        assert spared >= (6 if layout else 4) * 18  # two data-parallel ranks have 4 rows each
        for key, value in alone[step].items():
            assert values[key] == pytest.approx(value, rel=1e-4), (step, key)


@pytest.mark.full
def test_a_death_while_a_checkpoint_is_written_beside_training_leaves_the_one_before(options, tmp_path):
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    more = ["checkpoint.async_save=true", "trainer.save_freq=2", "trainer.total_training_steps=6"]
    overrides = [*options, *MEGATRON, *more, f"hydra.run.dir={tmp_path}/hydra"]
    command = [sys.executable, "-m", "verl.trainer.sft_trainer", *overrides]
    root, runs = tmp_path / "checkpoints", []
    (root / "global_step_5").mkdir(parents=True)  # not of the run
    for name, fault in (("killed", "kill:save_checkpoint:step=4"), ("resumed", "")):
        log = tmp_path / f"{name}.jsonl"
        environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "PYTHONPATH": os.getcwd(), "VERL_FAULT": fault}
        words = command if fault else [*command, "trainer.save_freq=3"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        runs.append(read(log))
        if fault:
            assert done.returncode == -signal.SIGKILL
            assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
            assert verify_checkpoint(root / "global_step_2") == [] != verify_checkpoint(root / "global_step_4")
        else:
            assert done.returncode == 0, done.stderr[-3000:]
            told = done.stdout + done.stderr
            assert told.count(f"that a killed run had left: {root}/global_step_4") == 1
    killed, resumed = runs
    assert list(resumed) == [3, 4, 5, 6]
    for step in (3, 4):
        assert all(killed[step][key] == resumed[step][key] for key in ("train/loss", "train/grad_norm", "train/lr"))
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert all(verify_checkpoint(root / f"global_step_{step}") == [] for step in (2, 3, 6))
    assert (root / "global_step_5").exists() and not (root / "global_step_4").exists()


@pytest.mark.full
@pytest.mark.parametrize("engine", [[], MEGATRON], ids=["fsdp", "megatron"])
def test_a_kill_before_the_first_save_leaves_the_checkpoint_that_the_user_chose(options, tmp_path, engine):
    if engine:
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    root = tmp_path / "checkpoints"
    train = partial(command, tmp_path, *options, *engine, "trainer.save_freq=2", "trainer.total_training_steps=6")

    def losses():
        entries = read_entries(root / "metrics.jsonl")
        return {step: entry["data"]["train/loss"] for step, entry in entries.items()}

    assert train()[0] == 0
    whole = losses()
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={root}/global_step_2"]
    assert train(*start, fault="kill:save_checkpoint:step=4")[0] == -signal.SIGKILL
    assert list(losses()) == [1, 2, 3, 4]
    code, output = train()
    assert code == 0 and f"resuming from {root}/global_step_2" in output and losses() == whole
    assert train("trainer.resume_mode=disable", fault="kill:save_checkpoint:step=2")[0] == -signal.SIGKILL
    code, output = train()
    assert code == 2 and f"names no checkpoint, but {root}/global_step_6 is complete" in output


@pytest.mark.full
def test_a_resume_on_megatron_takes_changed_settings_and_refuses_another_model(options, tmp_path):
    """As on FSDP, in processes of their own."""
    pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
    train = partial(command, tmp_path, *options, *MEGATRON, "trainer.save_freq=3", "trainer.test_freq=-1")
    code, output = train("trainer.total_training_steps=3", "optim.lr_warmup_steps=4")
    assert code == 0, output
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    shape = ["optim.lr_decay_style=cosine", "optim.min_lr=3e-3", "trainer.total_training_steps=6"]
    changed = ["optim.lr=3e-2", "optim.weight_decay=0.2", "optim.betas=[0.8,0.95]", "optim.lr_warmup_steps=2", *shape]
    told = ["lr=0.03, and was 0.01", "weight_decay=0.2, and was 0.01", "betas=[0.8,0.95], and was [0.9,0.999]"]
    told += ["lr_warmup_steps=2, and was 4", "lr_decay_style=cosine, and was constant"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-2)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, 6, min_lr_rate=0.1)
    new = []
    for _ in range(6):
        new += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    keeps = ["optim.use_checkpoint_opt_param_scheduler=true", f"trainer.default_local_dir={tmp_path}/kept"]
    for more, folder, rates in (([], "checkpoints", new[3:]), (keeps, "kept", [0.0075, 0.01, 0.01])):
        code, output = train(*changed, *more)
        assert code == 0 and all(f"optim.{text} in the checkpoint" in output for text in told), output
        entries = read_entries(tmp_path / folder / "metrics.jsonl")
        assert [entries[step]["data"]["train/lr"] for step in (4, 5, 6)] == pytest.approx(rates)
    code, output = train(*changed, "+model.override_config.rms_norm_eps=1e-3")
    assert code == 2 and "another model: this run's has rms_norm_eps=0.001, and 1e-06 in" in output


def command(folder, *words, fault=""):
    """Train in a process of its own; return its exit code and what it has written."""
    log, outputs = folder / "log.jsonl", f"hydra.run.dir={folder}/hydra"
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "PYTHONPATH": os.getcwd(), "VERL_FAULT": fault}
    train = [sys.executable, "-m", "verl.trainer.sft_trainer", *words, outputs]
    done = subprocess.run(train, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def start_two(arguments, log):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(log), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*command, "-m", "verl.trainer.sft_trainer", *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["trainer.device=npu"], r"trainer\.device=.?npu.*needs the package torch_npu.*write trainer\.device=cpu"),
        (
            ["checkpoint.async_save=true"],
            r"checkpoint\.async_save=true: is not supported with strategy=fsdp: write false",
        ),
        (["trainer.save_freq=sometimes"], r"trainer\.save_freq=.?sometimes.*after_each_epoch"),
        (["data.train_batch_size=21"], r"data\.train_batch_size=21.* more than the 20 training rows"),
        (["data.train_batch_size=0"], r"data\.train_batch_size=0.* 1 or more"),
        (["data.pad_mode=top"], "top"),
        (["data.train_files=/nowhere.parquet"], r"/nowhere\.parquet: no such file"),
        (["trainer.resume_mode=resume_path"], r"trainer\.resume_from_path=null: must name a global_step"),
        (["trainer.resume_from_path=/x/step_3"], r"trainer\.resume_from_path=/x/step_3: must name a global_step"),
        (["data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=null"], r"data\.micro_batch_size_per_gpu"),
        (["data.custom_cls.path=/nowhere.py", "data.custom_cls.name=X"], r"/nowhere\.py"),
        (["model.path=/no/such/folder"], r"model\.path.*/no/such/folder"),
    ],
)
def test_what_is_refused(options, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        SFTTrainer(build(options, *change))


def test_a_run_whose_answers_are_all_cut_off_stops_in_its_first_step(options, monkeypatch, tmp_path, files, caplog):
    """With one row that has a token to learn it goes on; what the message advises helps."""
    rows = pq.read_table(files / "train.parquet").to_pylist()
    long = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y"}]
    path = tmp_path / "long.parquet"
    cut = ["data.max_length=64", "data.truncation=right", f"data.train_files={path}", "data.val_files=null"]
    pq.write_table(pa.Table.from_pylist([{"messages": long}] * len(rows)), path)
    with pytest.raises(ValueError, match=r"data\.train_files: none of the \d+ rows has a token to learn.*max_length"):
        run(options, monkeypatch, tmp_path / "a.jsonl", *cut)
    _, steps = run(options, monkeypatch, tmp_path / "b.jsonl", *cut, "data.truncation=left")
    assert all(data["train/grad_norm"] > 0 for data in steps.values())
    pq.write_table(pa.Table.from_pylist([{"messages": long}] * (len(rows) - 1) + [rows[0]]), path)
    run(options, monkeypatch, tmp_path / "c.jsonl", *cut)
    assert caplog.text.count("no row of a step has a token to learn") == 1


@pytest.mark.parametrize("marks, masks", [(False, [[1, 0, 0], [0, 1, 0]]), (True, [[0, 0, 1], [0, 1, 0]])])
def test_a_mark_where_nothing_is_predicted_is_no_label(marks, masks):
    """No token comes before the first one, and none follows the last."""
    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer.marks_predictors = marks
    assert [trainer._has_label({"loss_mask": mask}) for mask in masks] == [False, True]


def test_a_balancing_loss_is_trained_and_shown(options, model, tmp_path, monkeypatch):
    """The loss is that of the tokens; the router learns by the balancing loss, which the metrics show beside it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path / "experts")
    shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(**shape, **heads, **ends, vocab_size=len(tokenizer), num_hidden_layers=1)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    short = [f"model.path={tmp_path}/experts", "trainer.total_training_steps=1"]
    override = "+model.override_config={{output_router_logits:true,router_aux_loss_coef:{}}}"
    steps = {}
    for coefficient in (0.0, 5.0):
        more = (*short, override.format(coefficient))
        steps[coefficient] = run(options, monkeypatch, tmp_path / f"{coefficient}.jsonl", *more)[1][1]
    off, on = steps[0.0], steps[5.0]
    assert "train/aux_loss" not in off and 2.0 <= on["train/aux_loss"] <= 4.0  # k experts at best, all of n at worst
    assert on["train/loss"] == off["train/loss"] and on["train/grad_norm"] != off["train/grad_norm"]
