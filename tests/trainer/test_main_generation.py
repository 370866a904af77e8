"""``main_generation`` with real workers: greedy responses are those of transformers, and a stopped run goes on."""

import io
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import make_tiny_model, make_tiny_vl_model
from verl.errors import DataError
from verl.trainer import main_generation
from verl.trainer.config.cli import CONFIG_DIR
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.invocation import call
from verl.trainer.generation import Generation
from verl.trainer.run import launch
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.vision.multi_modal import resolve

QUESTIONS = ["1+1=?", "What is 12 times 12?", "a", "Name three colours.", "2+3=?"]


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    monkeypatch.setattr(launch, "catch_signals", lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("generation")
    make_tiny_model(str(root / "model"), hidden_size=32, num_layers=1)
    rows = [{"prompt": [{"role": "user", "content": text}], "number": i} for i, text in enumerate(QUESTIONS)]
    datasets.Dataset.from_list(rows).to_parquet(root / "prompts.parquet")
    return root


def build(folder: Path, output: Path, *more: str):
    options = [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"data.path={folder}/prompts.parquet",
        f"data.output_path={output}",
        f"model.path={folder}/model",
        "rollout.name=hf",
        "rollout.dtype=float32",
        "rollout.prompt_length=64",
        "rollout.response_length=8",
        "rollout.top_k=-1",
        "rollout.top_p=1.0",
        *more,
    ]
    with initialize_config_dir(CONFIG_DIR, version_base=None):
        return compose("generation", options)


def reference(folder: Path) -> list[list[str]]:
    """Take the most likely token eight times, by one whole forward pass each."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    texts = []
    for question in QUESTIONS:
        ids = tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>", return_tensors="pt")
        start = ids.shape[1]
        for _ in range(8):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        texts.append([tokenizer.decode(ids[0, start:], skip_special_tokens=True)])
    return texts


@pytest.mark.parametrize(
    ("name", "workers"), [("hf", 2), ("vllm", 1), pytest.param("sglang", 1, marks=pytest.mark.full)]
)
def test_greedy_responses_are_those_of_transformers(ray_cluster, folder, tmp_path, name, workers):
    """Batches of two prompts and one: every response at its row, the other columns as they were."""
    if name == "sglang":
        pytest.importorskip("sglang")
    greedy = ("data.n_samples=1", "rollout.temperature=0", "data.batch_size=2", f"trainer.n_gpus_per_node={workers}")
    greedy += (f"rollout.name={name}",)
    main_generation.run_generation(build(folder, tmp_path / "out" / "x.parquet", *greedy))
    table = pq.read_table(tmp_path / "out" / "x.parquet")
    assert table.column_names == ["prompt", "number", "responses"]
    assert table["responses"].to_pylist() == reference(folder)
    assert table["number"].to_pylist() == list(range(5))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.parquet"]


def test_a_stopped_run_goes_on_and_gives_the_same(ray_cluster, folder, tmp_path, monkeypatch, capsys):
    from verl.trainer.generation import Generation

    sampled = ("data.n_samples=3", "rollout.temperature=1.0")
    whole = build(folder, tmp_path / "whole.parquet", *sampled, "data.batch_size=5")
    main_generation.run_generation(whole)
    expected = pq.read_table(tmp_path / "whole.parquet")["responses"].to_pylist()
    assert [len(texts) for texts in expected] == [3] * 5
    assert all(len(set(texts)) == 3 for texts in expected)  # of a vocabulary of 256 bytes

    stopped = build(folder, tmp_path / "stopped.parquet", *sampled, "data.batch_size=2")
    generate, calls = Generation._generate, []

    def failing(self, workers, rows):
        calls.append(list(rows))
        if len(calls) == 2:
            raise RuntimeError("the power failed")
        return generate(self, workers, rows)

    monkeypatch.setattr(Generation, "_generate", failing)
    with pytest.raises(SystemExit) as exit:
        main_generation.run_generation(stopped)
    assert exit.value.code == 1 and "the power failed" in capsys.readouterr().err
    assert not (tmp_path / "stopped.parquet").exists()
    main_generation.run_generation(stopped)
    assert calls == [[0, 1], [2, 3], [2, 3], [4]]
    assert pq.read_table(tmp_path / "stopped.parquet")["responses"].to_pylist() == expected


def test_the_chat_template_gets_its_arguments(folder, tmp_path):
    template = "+data.apply_chat_template_kwargs.chat_template='{{ messages[0].content }}{{ mark }}'"
    options = (template, "+data.apply_chat_template_kwargs.mark='?!'")
    generation = Generation(GenerationConfig.parse(build(folder, tmp_path / "out.parquet", *options)))
    assert [generation.tokenizer.decode(ids) for ids in generation.prompts] == [f"{text}?!" for text in QUESTIONS]


def test_a_prompt_that_an_assistant_has_begun(folder, tmp_path):
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]
    datasets.Dataset.from_list([{"prompt": begun}]).to_parquet(tmp_path / "begun.parquet")
    config = build(folder, tmp_path / "out.parquet", f"data.path={tmp_path}/begun.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'prompt' .*ends with an assistant's message"):
        Generation(GenerationConfig.parse(config))
    config.data.apply_chat_template_kwargs = {"continue_final_message": True, "add_generation_prompt": False}
    generation = Generation(GenerationConfig.parse(config))
    assert generation.tokenizer.decode(generation.prompts[0]) == "<|user|>a<|end|><|assistant|>So"


def picture(colour: str) -> dict[str, bytes]:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(file, "PNG")
    return {"bytes": file.getvalue()}


SEEN = [
    {"text": "a", "pictures": []},
    {"text": "<image>What colour?", "pictures": [picture("red")]},
    {"text": "<image> or <image>", "pictures": [picture("red"), picture("blue")]},
]


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    make_tiny_vl_model(str(root / "model"), kind="qwen2_5_vl")
    rows = [{"prompt": [{"role": "user", "content": row["text"]}], "pictures": row["pictures"]} for row in SEEN]
    shared = {"data_source": "colours", "reward_model": {"style": "rule", "ground_truth": "red"}}
    pq.write_table(pa.Table.from_pylist([row | shared for row in rows]), root / "prompts.parquet")
    return root


def test_prompts_with_images_are_those_of_training(vision_folder, tmp_path):
    options = ("data.image_key=pictures", "data.n_samples=2")
    generation = Generation(GenerationConfig.parse(build(vision_folder, tmp_path / "out.parquet", *options)))
    batch = generation._batch(range(3))
    settings = {"max_prompt_length": 64, "image_key": "pictures", "filter_overlong_prompts": False}
    media, seen = (resolve(batch.non_tensor_batch[name]) for name in ("multi_modal_data", "multi_modal_inputs"))
    path = str(vision_folder / "prompts.parquet")
    training = RLHFDataset(path, generation.tokenizer, settings, generation.processor)
    for row in range(6):
        expected = training[row // 2]
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert torch.equal(batch.batch[name][row], expected[name]), name
        assert batch.non_tensor_batch["raw_prompt_ids"][row] == expected["raw_prompt_ids"]
        assert media[row] == expected["multi_modal_data"]
        assert seen[row].keys() == expected["multi_modal_inputs"].keys()
        assert all(torch.equal(seen[row][name], value) for name, value in expected["multi_modal_inputs"].items())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            [],
            r"row 1, column 'prompt': has 1 <image> markers, and the file has no column 'images', it has .*'pictures'",
        ),
        (["data.image_key=photos"], r"data\.image_key=photos: no data file has this column, they have .*'pictures'"),
        (
            ["data.image_key=pictures", "rollout.prompt_length=8"],
            r"row 1: the prompt has \d+ tokens with its images and videos, rollout\.prompt_length is 8",
        ),
    ],
)
def test_images_that_cannot_be_shown_are_refused(vision_folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit:
        main_generation.run_generation(build(vision_folder, tmp_path / "x.parquet", *more))
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_images_have_the_limits_of_the_configuration(vision_folder, tmp_path, capsys):
    for more, message in (
        (["data.media.max_pixels=16"], r"row 1.*data\.media\.max_pixels=16"),
        (["data.media.image_formats=[EPS]"], r"data\.media\.image_formats=\[EPS\].*it starts a program"),
    ):
        options = ["data.image_key=pictures", "rollout.prompt_length=64", *more]
        with pytest.raises(SystemExit):
            main_generation.run_generation(build(vision_folder, tmp_path / "x.parquet", *options))
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rollout.temperature=0"], r"data\.n_samples=5.* must be 1 without sampling"),
        (["rollout.mode=async"], r"rollout\.mode=async.* must be sync"),
        (["rollout.load_format=dummy"], r"rollout\.load_format=dummy.*write auto"),
        (["+rollout.share_weights=true"], r"rollout\.share_weights=true.*needs a trainer.*write false"),
        (["rollout.top_p=2"], r"rollout\.top_p=2"),
        (["data.batch_size=0"], r"data\.batch_size=0.* must be an integer in \[1, 65536\]"),
        (["data.path=/nowhere.parquet"], r"data\.path=.*/nowhere\.parquet.*no such file"),
        (["model.path=/no/such/model"], r"model\.path=.*/no/such/model"),
        (["rollout.name=vllm", "rollout.tensor_model_parallel_size=2"], r"tensor_model_parallel_size=2.* 1 workers"),
        (["data.output_path=/etc/passwd/x.parquet"], r"data\.output_path=.*cannot be made: /etc/passwd"),
        (["data.prompt_key=question"], r"column 'question' \(data\.prompt_key\): is missing"),
        (["data.prompt_key=number"], r"row 0, column 'number' .*must be a list of messages"),
    ],
)
def test_what_is_refused_before_ray(folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit:
        main_generation.run_generation(build(folder, tmp_path / "x.parquet", *more))
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_check_passes_and_leaves_what_a_stopped_run_has_generated(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(call, "only_checks", True)
    done = tmp_path / ".x.parquet.part.jsonl"
    done.write_text('"of another model"\n[0, ["kept"]]\n')
    with pytest.raises(SystemExit) as exit:
        main_generation.run_generation(build(folder, tmp_path / "x.parquet"))
    assert exit.value.code == 0 and "passed all checks" in capsys.readouterr().out.splitlines()
    assert list(tmp_path.iterdir()) == [done] and "kept" in done.read_text()
