"""A folder that a run saves, or that is merged from its checkpoint, has the settings of the model it came from."""

import json
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_vl_model
from tests import remote_code
from tests.workers.engine import cases
from verl.model_merger.__main__ import main
from verl.workers.config import CheckpointConfig

GENERATION = {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "do_sample": True, "of_another_version": 1}
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
BIAS = "e_score_correction_bias"
FAMILIES = {
    "Qwen2": {},
    "Glm4Moe": cases.SIGMOID,
    "DeepseekV3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1,
    },
}  # fmt: skip
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma3 of transformers 5")
REMOTE = ("kimi_vl", "minicpmo")
"""Families whose code lies in the folder of the model."""
ENGINES = {"fsdp": {"model_dtype": "bf16"}, "fsdp in fp32": {"model_dtype": "fp32"}, "megatron": {"dtype": "bfloat16"}}


def write_tokenizer(folder: Path, **options: Any) -> None:
    """Write the files of a tokenizer as a hub has them: with its template and without a padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", model_max_length=77, **options)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def write_gemma3(folder: Path, published: bool = True) -> None:
    """Write Gemma 3 as a hub has it, with files of the processor under their older names.

    Args: ``published`` gives tensors the prefix that transformers 5 leaves out when it writes a new model.
    """
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    values = cases.tiny_config().to_dict()
    text = {key: values[key] for key in cases.SHARED} | {"head_dim": 16, "sliding_window": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=50)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    if published:
        weights = load_file(folder / "model.safetensors")
        renamed = {re.sub("^vision_tower", "vision_tower.vision_model", key): value for key, value in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    marks = {"boi_token": "w51", "eoi_token": "w52", "image_token": "w50"}
    write_tokenizer(folder, extra_special_tokens=marks)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Gemma3ImageProcessor"}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma3Processor"}))


def write_seeing(folder: Path, kind: str) -> None:
    """Write a vision-language model as a hub has it, with a file for each part of the processor."""
    make_tiny_vl_model(str(folder), kind, hidden_size=64)
    whole = json.loads((folder / "processor_config.json").read_text())
    names = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
    for part, name in names.items():
        (folder / name).write_text(json.dumps(whole[part] | {"processor_class": whole["processor_class"]}))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for name in ("processor_config.json", "chat_template.jinja"):
        (folder / name).unlink()


def dress(folder: Path) -> None:
    """Give a model weights in bf16 but for what files hold in fp32, end tokens, sampling values and permissions."""
    weights = load_file(folder / "model.safetensors")
    halves = {key: tensor if BIAS in key else tensor.bfloat16() for key, tensor in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    changed = {"dtype": "bfloat16", "eos_token_id": [2, 3], "pad_token_id": None, "of_another_version": [1]}
    (folder / "config.json").write_text(json.dumps(config | changed))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for path in folder.iterdir():
        path.chmod(0o640)


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models with settings and permissions of their own."""
    root = tmp_path_factory.mktemp("models")
    for name, changes in FAMILIES.items():
        cases.write_family(root / name, name, changes)
        write_tokenizer(root / name)
    for name in SEEING:
        if name.startswith("gemma3"):
            write_gemma3(root / name, published=name == "gemma3")
        else:
            write_seeing(root / name, name)
    for name in REMOTE:
        remote_code.write_model(root / name, name)
    for folder in root.iterdir():
        dress(folder)
    yield root
    if "megatron.core" in sys.modules:  # what its engines have started in this process
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def saved(source: Path, target: Path, engine: str, model: dict[str, Any], kind: str = "language_model") -> list[Path]:
    """Save an engine that has not trained, merge the checkpoint, and return both folders."""
    actor = target / "global_step_1" / "actor"
    settings = cases.model_config(source, **model)
    if engine == "megatron":
        pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
        from tests.workers.engine import megatron_cases

        built: Any = megatron_cases.build(source, ENGINES[engine], kind, model=settings)
    else:
        built = cases.build(source, model, ENGINES[engine], kind)
    built.checkpoint_config = CheckpointConfig(save_contents=["model", "hf_model"])
    built.save_checkpoint(str(actor), global_step=1)
    backend = engine.split()[0]
    words = ["merge", "--backend", backend, "--local_dir", str(actor), "--target_dir", str(target / "merged")]
    assert main([*words, *(["--trust-remote-code"] if settings.trust_remote_code else [])]) == 0
    return [actor / "huggingface", target / "merged"]


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]


def differences(source: Path, folder: Path) -> dict[str, Any]:
    """Return what differs between two folders: JSON files by key, weights by tensor, others and permissions by file."""
    ours, theirs = ({path.name: path for path in each.iterdir()} for each in (folder, source))
    found: dict[str, Any] = dict.fromkeys(ours.keys() ^ theirs.keys(), "only in one")
    for name in ours.keys() & theirs.keys():
        pair = [ours[name], theirs[name]]
        if len({stat.S_IMODE(path.stat().st_mode) for path in pair}) > 1:
            found[f"{name} mode"] = oct(pair[0].stat().st_mode)
        if name.endswith(".safetensors"):
            contents: list[dict[str, Any]] = [load_file(path) for path in pair]
            absent = torch.zeros(())
            for key in contents[0].keys() | contents[1].keys():
                got, expected = (content.get(key, absent) for content in contents)
                if got.dtype != expected.dtype or not torch.equal(got, expected):
                    found[f"{name} {key}"] = str(got.dtype)
        elif name.endswith(".json"):
            contents = [dict(leaves(json.loads(path.read_text()))) for path in pair]
            for key in contents[0].keys() | contents[1].keys():
                if contents[0].get(key, "absent") != contents[1].get(key, "absent"):
                    found[f"{name} {key}"] = contents[0].get(key, "absent")
        elif pair[0].read_bytes() != pair[1].read_bytes():
            found[name] = "other content"
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_differs_from_the_source(models_folder: Path, tmp_path: Path, family: str, engine: str) -> None:
    source = models_folder / family
    own, merged = saved(source, tmp_path, engine, {"load_tokenizer": True})
    assert differences(source, merged) == {}
    expected = {"config.json dtype": "float32"} if engine == "fsdp in fp32" else {}  # the dtype that the run trains in
    weights = {name for name in load_file(source / "model.safetensors") if BIAS not in name} if expected else set()
    expected |= {f"model.safetensors {name}": "torch.float32" for name in weights}
    assert differences(source, own) == expected


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        *product(SEEING, ["fsdp"]),
        *product(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ["megatron"]),
        *product(REMOTE, ["fsdp"]),
    ],
)
def test_processors_and_remote_code_are_the_source_s_too(
    models_folder: Path, tmp_path: Path, family: str, engine: str
) -> None:
    source = models_folder / family
    changed: dict[str, Any] = {}
    if family == "kimi_vl":  # trains without the method of its router that a bias belongs to
        changed = {"config.json text_config.topk_method": "greedy"}
        changed[f"model.safetensors language_model.model.layers.1.mlp.gate.{BIAS}"] = "torch.float32"
    for folder in saved(source, tmp_path, engine, {"load_tokenizer": True, "trust_remote_code": family in REMOTE}):
        assert differences(source, folder) == changed


def test_what_a_run_changes_on_purpose_is_written(models_folder: Path, tmp_path: Path) -> None:
    source = models_folder / "Qwen2"
    changes = {"override_config": {"rope_theta": 5e4, "eos_token_id": 5}, "custom_chat_template": "{{ messages }}"}
    for folder in saved(source, tmp_path, "fsdp", {"load_tokenizer": True} | changes):
        found = differences(source, folder)
        assert found == {
            "config.json eos_token_id": 5,
            "config.json rope_parameters.rope_theta": 5e4,
            "tokenizer_config.json chat_template": "absent",
            "chat_template.jinja": "only in one",
        }
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize(
    ("family", "engine", "architecture"),
    [
        ("Qwen2", "fsdp", "Qwen2ForTokenClassification"),
        ("Qwen2", "megatron", "Qwen2ForTokenClassification"),
        ("qwen2_5_vl", "fsdp", "Qwen2_5_VLForTokenClassification"),
        ("qwen2_5_vl", "megatron", "Qwen2_5_VLForTokenClassification"),
    ],
)
def test_a_critic_differs_by_its_head(
    models_folder: Path, tmp_path: Path, family: str, engine: str, architecture: str
) -> None:
    source = models_folder / family
    expected: dict[str, Any] = {"config.json id2label.0": "LABEL_0", "config.json label2id.LABEL_0": 0}
    expected["config.json architectures"] = [architecture]
    heads = {"model.safetensors score.weight", "model.safetensors score.bias", "model.safetensors lm_head.weight"}
    for folder in saved(source, tmp_path, engine, {"load_tokenizer": True}, "value_model"):
        found = differences(source, folder)
        assert {key: value for key, value in found.items() if key not in heads} == expected


def test_fields_under_older_names_stay(models_folder: Path, tmp_path: Path) -> None:
    """Files of earlier versions of transformers name the dtype and RoPE in another way."""
    source = tmp_path / "older"
    shutil.copytree(models_folder / "Qwen2", source)
    config = json.loads((source / "config.json").read_text())
    rope, dtype = config.pop("rope_parameters"), config.pop("dtype")
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": dtype}
    (source / "config.json").write_text(json.dumps(config | older))
    for folder in saved(source, tmp_path, "fsdp", {"load_tokenizer": True}):
        assert differences(source, folder) == {}
