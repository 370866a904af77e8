"""The small commands in scripts: their help, what they do, and what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import make_tiny_model, make_tiny_vl_model
from scripts import diagnose, init_random_model, legacy_model_merger

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "scripts" / "install_vllm_sglang_mcore.sh"


@pytest.mark.parametrize("command", [diagnose, init_random_model, legacy_model_merger])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


# ---- the report on the environment


def test_diagnose_is_the_doctor(tmp_path):
    """It runs from any folder, also where verl is not installed."""
    command = [sys.executable, str(ROOT / "scripts" / "diagnose.py"), "--json", "--quick"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["healthy"] else 1)
    assert {"machine"} <= {finding["area"] for finding in report["findings"]}


# ---- random models


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_tiny_model(str(tmp_path_factory.mktemp("source")), hidden_size=64, num_layers=2)


def made(source, folder, changes, *words):
    (folder / "new.json").write_text(changes if isinstance(changes, str) else json.dumps(changes))
    paths = ["--hf_model_path", str(source), "--new_config_path", str(folder / "new.json")]
    return init_random_model.main([*paths, "--output_path", str(folder / "out"), *words])


def test_a_model_in_other_sizes(source, tmp_path):
    assert made(source, tmp_path, {"num_hidden_layers": 3, "intermediate_size": 96}) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.num_hidden_layers, model.config.intermediate_size, model.config.hidden_size) == (3, 96, 64)
    assert model.dtype == torch.float32 and len(model.model.layers) == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert tokenizer("1 + 1")["input_ids"] == AutoTokenizer.from_pretrained(source)("1 + 1")["input_ids"]


def test_a_whole_config_as_folder_and_the_seed(source, tmp_path):
    words = ["--hf_model_path", source, "--new_config_path", source]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert init_random_model.main([*words, "--output_path", str(tmp_path / name), "--seed", seed]) == 0
    first, again, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).model.embed_tokens.weight for name in "abc"
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_key_inside_another(tmp_path):
    source = make_tiny_vl_model(str(tmp_path / "vl"), hidden_size=64)
    assert made(source, tmp_path, {"text_config": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}}) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 1 and config["text_config"]["hidden_size"] == 64
    unchanged = json.loads((Path(source) / "config.json").read_text())["vision_config"]
    assert config["vision_config"] | unchanged == config["vision_config"]
    assert list((tmp_path / "out").glob("*processor*.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("hello", "new.json: cannot be read: Expecting value"),
        ([1], 'must hold an object such as {"num_hidden_layers": 2}'),
        ({"num_layer": 2}, "the model has no key 'num_layer', it has ["),
        ({"num_attention_heads": 0}, "new.json: gives no model: ZeroDivisionError"),
        ({"hidden_size": "large"}, "new.json: gives no model: StrictDataclassFieldValidationError"),
        ({"hidden_act": "nope"}, "new.json: gives no model: KeyError: 'nope'"),
        ({"pad_token_id": 10**6}, "new.json: gives no model: AssertionError"),
        ({"vocab_size": 8}, "vocab_size=8 is below the 262 tokens of the tokenizer"),
    ],
)
def test_changes_that_give_no_model(source, tmp_path, capsys, changes, message):
    assert made(source, tmp_path, changes) == 2
    (told,) = capsys.readouterr().err.splitlines()[-1:]
    assert told.startswith("error: --new_config_path") and message in told
    assert not (tmp_path / "out").exists()


def test_folders_that_do_not_fit(source, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert made(tmp_path / "empty", tmp_path, {}) == 2
    assert f"--hf_model_path={tmp_path / 'empty'}: cannot be read" in capsys.readouterr().err
    (tmp_path / "empty" / "config.json").write_text("3")
    assert made(tmp_path / "empty", tmp_path, {}) == 2
    assert "cannot be read: TypeError" in capsys.readouterr().err
    assert made(source, tmp_path, {}) == 0
    assert made(source, tmp_path, {}) == 2
    assert f"--output_path={tmp_path / 'out'}: holds a model already" in capsys.readouterr().err


# ---- the earlier merger


def test_the_earlier_merger_passes_its_arguments_on(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(legacy_model_merger, "merge", lambda arguments: asked.append(arguments) or 0)
    words = ["merge", "--backend", "fsdp", "--local_dir", "/run/actor", "--target_dir", "/out"]
    assert legacy_model_merger.main([*words, "--hf_model_path", "Qwen/Qwen2-7B"]) == 0
    assert asked == [words] and "--hf_model_path is ignored" in capsys.readouterr().err


def test_the_earlier_merger_names_a_folder_without_a_checkpoint(tmp_path, capsys):
    assert legacy_model_merger.main(["merge", "--backend", "fsdp", "--local_dir", str(tmp_path)]) == 2
    assert f"error: {tmp_path} holds no fsdp_config.json" in capsys.readouterr().err


# ---- the installation for CUDA


def installed(folder: Path, *words: str, **variables: str) -> tuple[int, list[str], str]:
    """Run the installation with a Python that notes what it is asked for; return exit code, notes and output."""
    python = folder / "python3"
    python.write_text('#!/bin/bash\necho "$*" >>"$NOTES"\n')
    python.chmod(0o755)
    notes = folder / "notes"
    notes.write_text("")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(notes), **variables}
    done = subprocess.run(["bash", INSTALL, *words], env=environment, capture_output=True, text=True)
    return done.returncode, notes.read_text().splitlines(), done.stdout + done.stderr


def test_installation(tmp_path):
    code, notes, _ = installed(tmp_path)
    pip = "-m pip install --no-cache-dir"
    assert code == 0 and notes == [
        f"{pip} -e .[vllm,mcore]",
        f"{pip} -e .[geo,math,test]",
        f"{pip} --no-build-isolation -e .[gpu]",
        f"{pip} --no-build-isolation transformer-engine[pytorch]",
        "-m verl.utils.doctor",
    ]
    for engine, chosen in (("vllm", {}), ("vllm", {"USE_VLLM": "1"}), ("sglang", {"USE_SGLANG": "1"})):
        code, notes, _ = installed(tmp_path, **chosen, USE_MEGATRON="0", USE_KERNELS="0")
        assert code == 0 and notes == [f"{pip} -e .[{engine}]", f"{pip} -e .[geo,math,test]", "-m verl.utils.doctor"]
    code, notes, output = installed(tmp_path, USE_SGLANG="1", USE_VLLM="1")
    assert (code, notes) == (2, []) and "pin two versions of torch: make an environment for each" in output


def test_installation_help_and_unknown_argument(tmp_path):
    code, notes, output = installed(tmp_path, "--help")
    assert (code, notes) == (0, []) and "USE_MEGATRON 0: leave out Megatron-Core" in output and "set -e" not in output
    code, notes, output = installed(tmp_path, "--all")
    assert (code, notes) == (2, []) and "error: unknown argument --all" in output
