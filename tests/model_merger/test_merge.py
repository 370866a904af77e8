"""Merged shards of two processes equal the engine's own export, and transformers loads them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.model_merger.ranks import KINDS, run_rank
from tests.ranks import spawn_ranks
from tests.workers.engine import cases
from verl.errors import CheckpointError
from verl.model_merger.__main__ import main
from verl.model_merger.base_model_merger import generate_config_from_args, parse_args
from verl.model_merger.fsdp_model_merger import FSDPModelMerger
from verl.utils.checkpoint.files import record_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge")
    cases.write_model(folder / "plain")
    cases.write_model(folder / "tied", tie_word_embeddings=True)
    cases.write_family(folder / "glm4_moe", "Glm4Moe", cases.SIGMOID)
    cases.write_model(folder / "half").bfloat16().save_pretrained(folder / "half")
    spawn_ranks(run_rank, (2, folder))
    return folder


def actor(root: Path, name: str) -> str:
    return str(root / name / "global_step_1" / "actor")


def run(command: str, root: Path, name: str, *more: object) -> int:
    return main([command, "--backend", "fsdp", "--local_dir", actor(root, name), *map(str, more)])


def same(got: dict, expected: dict) -> None:
    assert list(got) == sorted(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_untrained_weights_are_the_bytes_of_the_source(root, tmp_path):
    exported = torch.load(root / "half.pt")["weights"]
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())  # which FSDP trains in
    assert run("merge", root, "half", "--target_dir", tmp_path / "hf") == 0
    merged, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", root / "half"))
    assert all(tensor.dtype == torch.bfloat16 for tensor in source.values())
    same(dict(sorted(merged.items())), source)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16


def test_the_established_classes_merge_and_compare(root, tmp_path):
    def merger(*words: object) -> FSDPModelMerger:
        command, *options = map(str, words)
        shared = ["--backend", "fsdp", "--local_dir", actor(root, "plain")]
        return FSDPModelMerger(generate_config_from_args(parse_args([command, *shared, *options])))

    first = merger("merge", "--target_dir", tmp_path / "hf")
    first.merge_and_save()
    first.cleanup()
    exported = torch.load(root / "plain.pt")["weights"]
    same(dict(sorted(load_file(tmp_path / "hf" / "model.safetensors").items())), exported)
    merger("test", "--test_hf_dir", tmp_path / "hf").merge_and_save()
    with pytest.raises(CheckpointError, match="tensors differ, the first: "):
        merger("test", "--test_hf_dir", root / "plain").merge_and_save()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "half"])
def test_equals_the_export_of_the_engine(root, tmp_path, name):
    adapted = ["--merge-lora"] if "lora" in name else []
    assert run("merge", root, name, "--target_dir", tmp_path / "hf", *adapted) == 0
    exported = torch.load(root / f"{name}.pt")["weights"]
    same(dict(sorted(load_file(tmp_path / "hf" / "model.safetensors").items())), exported)
    auto = AutoModelForTokenClassification if "value" in name else AutoModelForCausalLM
    model, loading = auto.from_pretrained(tmp_path / "hf", dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    for key, parameter in cases.under_checkpoint_names(model, dict(model.named_parameters())).items():
        assert torch.equal(parameter, exported[key]), key
    assert run("test", root, name, "--test_hf_dir", tmp_path / "hf", *adapted) == 0


@pytest.mark.parametrize("name", ["lora", "value lora", "lora experts"])
def test_an_adapter_is_split_off(root, tmp_path, name):
    from peft import PeftModel

    assert run("merge", root, name, "--target_dir", tmp_path / "hf") == 0
    exported = torch.load(root / f"{name}.pt")
    adapter = load_file(tmp_path / "hf" / "lora_adapter" / "adapter_model.safetensors")
    same(dict(sorted(adapter.items())), exported["adapter"])
    config = json.loads((tmp_path / "hf" / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    auto = AutoModelForTokenClassification if "value" in name else AutoModelForCausalLM
    base = auto.from_pretrained(tmp_path / "hf")
    original = load_file(root / ("glm4_moe" if "experts" in name else "plain") / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(base.state_dict()[key], original[key])
    whole = PeftModel.from_pretrained(base, tmp_path / "hf" / "lora_adapter").merge_and_unload()
    assert not torch.equal(whole.state_dict()[key], original[key])
    merged = cases.under_checkpoint_names(whole, whole.state_dict())
    for key, tensor in exported["weights"].items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-6, rtol=0)


def test_another_dtype_and_a_second_merge_into_the_same_folder(root, tmp_path):
    exported = torch.load(root / "plain.pt")["weights"]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier merge")
    assert run("merge", root, "plain", "--target_dir", tmp_path / "hf", "--dtype", "bf16") == 0
    assert [path.name for path in (tmp_path / "hf").glob("*.safetensors")] == ["model.safetensors"]
    same(
        dict(sorted(load_file(tmp_path / "hf" / "model.safetensors").items())),
        {name: tensor.bfloat16() for name, tensor in exported.items()},
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_differs_is_named(root, tmp_path, capsys):
    assert run("test", root, "plain", "--test_hf_dir", root / "plain") == 1
    said = capsys.readouterr().out
    assert "tensors differ; the first:" in said and "model.embed_tokens.weight differs in" in said
    assert run("test", root, "tied", "--test_hf_dir", root / "plain") == 1
    assert run("test", root, "plain", "--test_hf_dir", tmp_path) == 2


def diverge(folder: Path) -> None:
    """Write a NaN into the part of the first rank, as if it had been saved so."""
    part = folder / "model_world_size_2_rank_0.pt"
    state = torch.load(part, weights_only=False)
    state["model.norm.weight"].to_local()[0] = torch.nan
    torch.save(state, part)
    manifest = folder / "manifest_world_size_2_rank_0.json"
    content = json.loads(manifest.read_text())
    kept = [each for each in content["files"] if each["name"] != part.name]
    content["files"] = [*kept, asdict(record_file(folder, part.name))]
    manifest.write_text(json.dumps(content))


def test_what_is_refused(root, tmp_path, capsys):
    def refusal(name: str, *more: object, local_dir: Path | None = None) -> str:
        arguments = ["merge", "--backend", "fsdp", "--local_dir", str(local_dir or actor(root, name))]
        assert main([*arguments, "--target_dir", str(tmp_path / "out"), *map(str, more)]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    said = refusal("plain", local_dir=root / "plain" / "global_step_1")
    assert "<run>/global_step_<N>/actor" in said and actor(root, "plain") in said
    assert actor(root, "plain") in refusal("plain", local_dir=root / "plain")
    assert "is not a folder" in refusal("plain", local_dir=tmp_path / "nowhere")
    assert "is not a critic" in refusal("plain", "--is-value-model")
    broken = tmp_path / "broken"
    for change, message in (
        (lambda: (broken / "model_world_size_2_rank_1.pt").unlink(), "model_world_size_2_rank_1.pt is missing"),
        (lambda: (broken / "model_world_size_2_rank_0.pt").write_bytes(b"x"), "rank_0.pt has 1 bytes instead of"),
        (lambda: (broken / "manifest_world_size_2_rank_1.json").unlink(), "rank 1 did not finish writing"),
        (lambda: (broken / "huggingface" / "config.json").unlink(), "config.json is missing"),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(actor(root, "plain"), broken)
        (broken / "optim_world_size_2_rank_0.pt").unlink()  # is not needed
        change()
        assert message in refusal("plain", local_dir=broken)
    shutil.rmtree(broken)
    shutil.copytree(actor(root, "plain"), broken)
    diverge(broken)
    said = f"checkpoint {broken} holds NaN in model.norm.weight: training had diverged before this save"
    assert said in refusal("plain", local_dir=broken)
    arguments = ["merge", "--backend", "megatron", "--local_dir", actor(root, "plain")]
    assert main(arguments) == 2 and "use --backend fsdp" in capsys.readouterr().err


LAYOUT = "fsdp_config.json"
CONFIG = "huggingface/config.json"
MANIFESTS = [f"manifest_world_size_2_rank_{rank}.json" for rank in range(2)]
SHARDS = [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def replaced(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a file in the place of one, as if it had been saved so."""
    write(folder / name)
    for path in folder.glob("manifest_*.json"):
        records = json.loads(path.read_text())["files"]
        again = [asdict(record_file(folder, each["name"])) if each["name"] == name else each for each in records]
        changed(path, files=again)


def forgotten(folder: Path, prefix: str) -> None:
    """Take files out of the manifests, as if no run had written them."""
    for path in folder.glob("manifest_*.json"):
        records = json.loads(path.read_text())["files"]
        changed(path, files=[each for each in records if not each["name"].startswith(prefix)])


def without_configuration(folder: Path) -> None:
    forgotten(folder, "huggingface/")
    shutil.rmtree(folder / "huggingface")


DAMAGES = {
    "layout of no dict": (
        lambda at: (at / LAYOUT).write_text("[]"),
        f"broken cannot be merged: {LAYOUT} cannot be read",
    ),
    "dtype": (lambda at: changed(at / LAYOUT, source_dtype=["x"]), f"broken/{LAYOUT} cannot be read"),
    "dtypes": (lambda at: changed(at / LAYOUT, other_dtypes={"a": "float99"}), f"broken/{LAYOUT} cannot be read"),
    "permissions": (lambda at: changed(at / LAYOUT, weights_mode="x"), f"broken/{LAYOUT} cannot be read"),
    **{
        f"permissions {mode}": (
            lambda at, mode=mode: changed(at / LAYOUT, weights_mode=mode),
            f"broken/{LAYOUT} cannot be",
        )
        for mode in (True, -1, 10**12)
    },
    "manifest without a step": (
        lambda at: changed(at / MANIFESTS[0], global_step="x"),
        f"{MANIFESTS[0]} cannot be read",
    ),
    "manifest of numbers": (
        lambda at: changed(at / MANIFESTS[0], files=[{"name": 3, "num_bytes": 1, "crc32": 2}]),
        f"{MANIFESTS[0]} cannot be read",
    ),
    "shard of numbers": (
        lambda at: replaced(at, SHARDS[1], lambda path: torch.save({1: torch.zeros(1)}, path)),
        f"broken/{SHARDS[1]} holds no tensors by name",
    ),
    "null configuration": (
        lambda at: replaced(at, CONFIG, lambda path: path.write_text("null")),
        "broken/huggingface holds no valid model configuration: ",
    ),
    "configuration of no model": (
        lambda at: replaced(at, CONFIG, lambda path: changed(path, num_attention_heads=0)),
        "broken/huggingface holds no valid model configuration: ZeroDivisionError",
    ),
    "negative size": (
        lambda at: replaced(at, CONFIG, lambda path: changed(path, hidden_size=-8)),
        "broken/huggingface holds no valid model configuration: RuntimeError",
    ),
    "other number of ranks": (lambda at: changed(at / LAYOUT, world_size=4), "rank_0.json is missing: rank 0 did not"),
    "manifest of another rank": (
        lambda at: shutil.copy(at / MANIFESTS[0], at / MANIFESTS[1]),
        f"{MANIFESTS[1]} cannot be read (it is the manifest of rank 0 of 2, not of rank 1 of 2)",
    ),
    "manifest of another number": (lambda at: changed(at / MANIFESTS[0], world_size=4), "the manifest of rank 0 of 4"),
    "manifest of another step": (lambda at: changed(at / MANIFESTS[1], global_step=9), "different steps, [1, 9]"),
    "shard twice": (
        lambda at: replaced(at, SHARDS[1], lambda path: shutil.copy(at / SHARDS[0], path)),
        "/broken join to",
    ),
    "shard of another model": (
        lambda at: replaced(at, SHARDS[1], lambda path: torch.save({"a": torch.zeros(1)}, path)),
        f"{SHARDS[0]} and {SHARDS[1]} in",
    ),
    "shard of no dict": (
        lambda at: replaced(at, SHARDS[1], lambda path: torch.save([1], path)),
        f"broken/{SHARDS[1]} holds no tensors by name",
    ),
    "cut shard": (
        lambda at: replaced(at, SHARDS[1], lambda path: path.write_bytes(path.read_bytes()[:-200])),
        f"broken/{SHARDS[1]} cannot be read",
    ),
    "no configuration": (without_configuration, "broken/huggingface/config.json is missing: copy it back"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(root, tmp_path, capsys, damage):
    change, message = DAMAGES[damage]
    broken = tmp_path / "broken"
    shutil.copytree(actor(root, "plain"), broken)
    change(broken)
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(broken), "--target_dir", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and not (tmp_path / "out").exists(), said


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"r": 1}', '{"r": "x", "lora_alpha": 2}', '{"r": 0, "lora_alpha": 2}']
)
def test_a_damaged_adapter_configuration_is_named(root, tmp_path, capsys, content):
    broken = tmp_path / "broken"
    shutil.copytree(actor(root, "lora"), broken)
    (broken / "lora_adapter" / "adapter_config.json").write_text(content)
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(broken), "--target_dir", str(tmp_path / "out")]) == 2
    assert "broken/lora_adapter/adapter_config.json, which holds the scale" in capsys.readouterr().err


def test_a_target_that_cannot_be_written_or_holds_the_source_is_refused_before_the_merge(
    root, tmp_path, capsys, monkeypatch
):
    source = tmp_path / "run" / "actor"
    shutil.copytree(actor(root, "plain"), source)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").touch()
    monkeypatch.chdir(source)
    for target, problem in (
        (source, "is part of the checkpoint"),
        (".", "is part of the checkpoint"),
        ("../actor/huggingface", "is part of the checkpoint"),
        (source / "merged", "is part of the checkpoint"),
        (tmp_path / "link", "is part of the checkpoint"),
        ("..", "holds the checkpoint"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be made"),
        ("", "names no folder"),
    ):
        assert main(["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(target)]) == 2
        assert f"--target_dir={target} {problem}" in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*") if path.name not in ("link", "file")) == before


def test_a_reference_that_holds_no_weights_is_named(root, tmp_path, capsys):
    (tmp_path / "file").touch()
    for reference, problem in (
        ("nowhere", "is no folder"),
        ("file", "is no folder"),
        (".", "holds no model.safetensors"),
    ):
        assert run("test", root, "plain", "--test_hf_dir", tmp_path / reference) == 2
        assert problem in capsys.readouterr().err


def test_an_upload_that_cannot_succeed_is_refused_before_the_merge(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name, problem in (
        ("a b", "Repo id must"),
        ("a/b/c", "Repo id must"),
        ("name/model", "needs a login: set HF_TOKEN"),
    ):
        assert run("merge", root, "plain", "--target_dir", tmp_path / "hf", "--hf_upload_path", name) == 2
        assert f"--hf_upload_path={name}: {problem}" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run("merge", root, "plain", "--target_dir", tmp_path / "hf", "--hf_upload_path", "name/model") == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err and not (tmp_path / "hf").exists()


def test_a_failed_upload_names_the_merged_folder(root, tmp_path, capsys, monkeypatch):
    import huggingface_hub

    class Api:
        def create_repo(self, **kwargs):
            raise OSError("403 Forbidden")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr("verl.model_merger.merger.check_upload", lambda name: None)
    assert run("merge", root, "plain", "--target_dir", tmp_path / "hf", "--hf_upload_path", "name/model") == 2
    assert f"403 Forbidden: the merged model is in {tmp_path / 'hf'}" in capsys.readouterr().err


def test_upload(root, tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def create_repo(self, **kwargs):
            calls.append(("create", kwargs["repo_id"], kwargs["private"]))

        def upload_folder(self, **kwargs):
            assert (Path(kwargs["folder_path"]) / "model.safetensors").is_file()
            calls.append(("upload", kwargs["repo_id"]))
            return "commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr("verl.model_merger.merger.check_upload", lambda name: None)
    hub = ("--hf_upload_path", "name/model", "--private")
    assert run("merge", root, "plain", "--target_dir", tmp_path / "hf", *hub) == 0
    assert calls == [("create", "name/model", True), ("upload", "name/model")]
