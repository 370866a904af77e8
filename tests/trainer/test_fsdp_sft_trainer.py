"""The established entry of supervised training computes what the other one does on the same rows."""

import sys

import datasets
import pytest
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from examples.tiny_model import make_tiny_model
from tests.trainer.test_sft_trainer import read
from verl.trainer import fsdp_sft_trainer, sft_trainer
from verl.utils import hf_tokenizer

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital'")]

CONVERSATIONS = [(f"{i}+{j}=?", f"it is {i + j}") for i in range(4) for j in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    make_tiny_model(str(root / "model"), hidden_size=32, num_layers=1)
    datasets.Dataset.from_list([{"question": q, "answer": a} for q, a in CONVERSATIONS]).to_parquet(
        root / "pairs.parquet"
    )
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CONVERSATIONS]
    datasets.Dataset.from_list([{"messages": each} for each in turns]).to_parquet(root / "messages.parquet")
    return root


def run(entry, monkeypatch, tmp_path, name, options):
    """Call the command of an entry point in this process; returns the metrics of each step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    shared = [
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=32",
        "optim.lr=1e-3",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.report=false",
        "trainer.total_epochs=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={tmp_path}/{name}",
        f"hydra.run.dir={tmp_path}/hydra_{name}",
    ]
    monkeypatch.setattr(sys, "argv", [name, *shared, *options])
    entry()
    return read(tmp_path / f"{name}.jsonl")


def test_both_entries_give_the_same_metrics(folder, monkeypatch, tmp_path):
    from verl.trainer import fsdp_sft_trainer, sft_trainer

    files = [f"data.{name}_files={folder}/pairs.parquet" for name in ("train", "val")]
    older = [f"model.partial_pretrain={folder}/model", *files]
    established = run(fsdp_sft_trainer.main, monkeypatch, tmp_path, "established", older)
    files = [f"data.{name}_files={folder}/messages.parquet" for name in ("train", "val")]
    # the defaults in which the two trees differ
    newer = ["data.use_dynamic_bsz=false", "data.pad_mode=right", "model.use_remove_padding=false"]
    newer += ["optim.betas=[0.9,0.95]", "optim.lr_scheduler_type=cosine", "optim.lr_warmup_steps_ratio=0.1"]
    newer += [f"model.path={folder}/model", *files]
    engine = run(sft_trainer.main, monkeypatch, tmp_path, "engine", newer)
    assert list(established) == list(engine) == [1, 2, 3, 4]
    assert "val/loss" in established[2] and established[4]["val/loss"] < established[2]["val/loss"]
    for step, metrics in engine.items():
        assert established[step] == pytest.approx(metrics, rel=1e-6), step


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"prompt_key": "prompt", "max_length": 8}, "SFTDataset"),
        ({"prompt_key": "prompt", "multiturn": {"enable": True}, "custom_cls": {"path": None}}, "MultiTurnSFTDataset"),
        ({"messages_key": "messages"}, "MultiTurnSFTDataset"),
        ({"custom_cls": {"path": __file__, "name": "Rows"}}, "Rows"),
    ],
)
def test_the_data_set_follows_the_configuration(data, name, tmp_path):
    path = str(tmp_path / "rows.parquet")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    datasets.Dataset.from_list([{"prompt": "a", "response": "b", "messages": turns}]).to_parquet(path)
    tokenizer = hf_tokenizer(make_tiny_model(str(tmp_path / "model"), hidden_size=32, num_layers=1))
    for entry in (fsdp_sft_trainer, sft_trainer):
        dataset = entry.create_sft_dataset(path, OmegaConf.create(data), tokenizer)
        assert type(dataset).__name__ == name and len(dataset) == 1


class Rows(Dataset):
    """A data set as users write them."""

    def __init__(self, parquet_files, tokenizer, config):
        self.rows = datasets.Dataset.from_parquet(parquet_files)

    def __len__(self):
        return len(self.rows)
