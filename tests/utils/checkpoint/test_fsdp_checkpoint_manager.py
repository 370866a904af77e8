"""Checkpoints on one and two processes: bit for bit what was saved, and refused when they are not whole."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import spawn_ranks
from verl.errors import CheckpointError
from verl.utils.checkpoint import find_complete_checkpoints, verify_checkpoint
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.faults import InjectedFault


class Step(nn.Module):
    """One module around the parts, so that FSDP sees a single forward."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, tokens):
        parts = self.parts
        hidden = parts["norm"](nn.functional.dropout(parts["body"](parts["embed"](tokens)), 0.3))
        return nn.functional.cross_entropy(parts["head"](hidden), tokens)


def train(model, optimizer, schedule, steps):
    """Train on data and dropout that come from every generator of the process; returns what each step saw."""
    seen = []
    for _ in range(steps):
        tokens = torch.randint(0, 7, (5,)) + random.randrange(2) - int(np.random.randint(2))
        loss = model(tokens.clamp(0, 6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seen.append((loss.item(), schedule.get_last_lr()[0], torch.rand(1).item(), np.random.rand(), random.random()))
    return seen


def state_of(model, optimizer):
    local = lambda x: x.to_local() if isinstance(x, DTensor) else x  # noqa: E731
    tensors = {f"model {name}": local(value).clone() for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {index} {key}": local(value).clone() for key, value in entry.items()}
    return tensors


def make(seed, mesh=None, config=None, width=6):
    """Build a model with a tied head, buffers and an uneven dim; returns it with optimizer, schedule and manager."""
    torch.manual_seed(seed)
    parts = nn.ModuleDict({"embed": nn.Embedding(7, width), "body": nn.Linear(width, width),
                           "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 7, bias=False)})  # fmt: skip
    parts["head"].weight = parts["embed"].weight
    model = Step(parts)
    if mesh is not None:
        fully_shard(parts["body"], mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = [list(parts["body"].parameters()), [parts["embed"].weight, *parts["norm"].parameters()]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, schedule, FSDPCheckpointManager(model, optimizer, schedule, None, config)


def check_resume_is_bitwise(root, mesh, rank):
    """Save at step 3 of 6, load into another model with other random states, go on: equal in every bit."""
    random.seed(rank), np.random.seed(rank)
    model, optimizer, schedule, manager = make(0, mesh)
    torch.manual_seed(100 + rank)
    train(model, optimizer, schedule, 3)
    saved = state_of(model, optimizer)
    manager.save_checkpoint(str(root / "global_step_3" / "actor"), global_step=3)
    expected = train(model, optimizer, schedule, 3)
    final = state_of(model, optimizer)

    random.seed(77), np.random.seed(77)
    model, optimizer, schedule, manager = make(55, mesh)
    train(model, optimizer, schedule, 1)  # an optimizer that has a state of its own
    manager.load_checkpoint(str(root / "global_step_3" / "actor"))
    torch.testing.assert_close(state_of(model, optimizer), saved, atol=0, rtol=0)
    assert model.parts["head"].weight is model.parts["embed"].weight
    assert train(model, optimizer, schedule, 3) == expected
    torch.testing.assert_close(state_of(model, optimizer), final, atol=0, rtol=0)


def check_export(root, mesh, rank):
    """Full weights by safetensors, in more than one shard, from gathered tensors."""
    from safetensors.torch import load_file

    from verl.utils.checkpoint import hf_export

    config = {"save_contents": ["hf_model"], "load_contents": []}
    model, *_, manager = make(3, mesh, config)
    full = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    folder = root / "export"
    with mock.patch.object(hf_export, "MAX_SHARD_BYTES", 200):
        manager.save_checkpoint(str(folder))
        manager.save_checkpoint(str(root / "named"), named_weights=iter(list(full.items())[:2]))
    if rank == 0:
        index = json.loads((folder / "huggingface" / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1 and {p.name for p in (folder / "huggingface").glob("*.safetensors")} == files
        loaded = {k: v for file in files for k, v in load_file(folder / "huggingface" / file).items()}
        tied = "parts.head.weight"
        torch.testing.assert_close(loaded, {k: v for k, v in full.items() if k != tied}, atol=0, rtol=0)
        assert verify_checkpoint(folder) == [] and verify_checkpoint(root / "named") == []
    assert not list(folder.glob("model_world*"))


def check_refusals_reach_every_rank(root, mesh, rank):
    """One rank's file is truncated: all ranks stop, name it, and nothing has changed."""
    good, bad = root / "global_step_3" / "actor", root / "global_step_4" / "actor"
    model, optimizer, schedule, manager = make(5, mesh)
    train(model, optimizer, schedule, 1)
    manager.save_checkpoint(str(bad), global_step=4)
    last = dist.get_world_size() - 1
    name = f"optim_world_size_{last + 1}_rank_{last}.pt"
    if rank == 0:
        (bad / name).write_bytes((bad / name).read_bytes()[:-10])
    dist.barrier()
    before = state_of(model, optimizer)
    with pytest.raises(
        CheckpointError, match=rf"{name} has \d+ bytes instead of .*global_step_3.*resume_path"
    ) as error:
        manager.load_checkpoint(str(bad))
    assert str(good.parent) in str(error.value)
    torch.testing.assert_close(state_of(model, optimizer), before, atol=0, rtol=0)


def check_other_world_size_is_cleaned(root, mesh, rank):
    """A save over the files of another world size leaves none of those, and none of a writer that was killed."""
    folder = root / "again"
    if rank == 0:
        folder.mkdir()
        for name in ("model_world_size_9_rank_8.pt", "manifest_world_size_9_rank_0.json", ".x.1.verl.tmp"):
            (folder / name).write_text("old")
    dist.barrier()
    make(6, mesh)[-1].save_checkpoint(str(folder))
    assert not list(folder.glob("*_size_9_*")) and not list(folder.glob(".*"))
    assert verify_checkpoint(folder) == []


def run_rank(rank, world_size, root):
    root = Path(root)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    check_resume_is_bitwise(root, mesh, rank)
    check_export(root, mesh, rank)
    check_refusals_reach_every_rank(root, mesh, rank)
    check_other_world_size_is_cleaned(root, mesh, rank)
    hybrid = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ddp", "fsdp"))
    (root / "hsdp").mkdir(exist_ok=True)
    check_resume_is_bitwise(root / "hsdp", hybrid, rank)
    if world_size > 1:  # the hybrid checkpoint holds whole tensors on each rank, this model half of them
        *_, manager = make(0, mesh)
        with pytest.raises(CheckpointError, match="fsdp_size to its value at the save"):
            manager.load_checkpoint(str(root / "hsdp" / "global_step_3" / "actor"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_rank_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    spawn_ranks(run_rank, (2, str(root)))
    return root


def test_two_ranks(two_rank_root):
    """What the ranks asserted; and the established names of the files."""
    names = {path.name for path in (two_rank_root / "global_step_3" / "actor").iterdir()}
    parts = {f"{part}_world_size_2_rank_{r}.pt" for part in ("model", "optim", "extra_state") for r in (0, 1)}
    manifests = {f"manifest_world_size_2_rank_{r}.json" for r in (0, 1)}
    assert names == parts | manifests | {"fsdp_config.json", "huggingface"}
    layout = json.loads((two_rank_root / "global_step_3" / "actor" / "fsdp_config.json").read_text())
    assert layout == {"FSDP_version": 2, "world_size": 2}


def test_one_sharded_rank(tmp_path):
    run_rank(0, 1, tmp_path)


def test_another_world_size_is_refused_with_a_way_out(two_rank_root):
    *_, manager = make(0)
    with pytest.raises(ValueError, match=r"written by 2 ranks and cannot be read by 1: start with 2.*model_merger"):
        manager.load_checkpoint(str(two_rank_root / "global_step_3" / "actor"))


def test_plain_module_resumes_bitwise(tmp_path):
    check_resume_is_bitwise(tmp_path, None, 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A root with complete checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("saved")
    model, optimizer, schedule, manager = make(0)
    for step in (1, 2):
        train(model, optimizer, schedule, 1)
        manager.save_checkpoint(str(root / f"global_step_{step}" / "actor"), global_step=step)
        (root / f"global_step_{step}" / "data.pt").write_bytes(b"x")
    return root


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


MODEL, MANIFEST = "model_world_size_1_rank_0.pt", "manifest_world_size_1_rank_0.json"
DAMAGE = {
    "missing": (MODEL, Path.unlink, f"{MODEL} is missing"),
    "truncated": (MODEL, lambda p: p.write_bytes(p.read_bytes()[:-1]), f"{MODEL} has .* bytes instead of"),
    "empty": (MODEL, lambda p: p.write_bytes(b""), f"{MODEL} has 0 bytes instead of"),
    "changed": (MODEL, flip, f"{MODEL} has the right size but the wrong content"),
    "optimizer changed": ("optim_world_size_1_rank_0.pt", flip, "optim_world_size_1_rank_0.pt has the right size"),
    "no manifest": (MANIFEST, Path.unlink, f"{MANIFEST} is missing: rank 0 did not finish"),
    "half a manifest": (MANIFEST, lambda p: p.write_text(p.read_text()[:50]), f"{MANIFEST} cannot be read"),
    "manifest without files": (MANIFEST, lambda p: p.write_text("{}"), f"{MANIFEST} cannot be read"),
    "no layout": ("fsdp_config.json", Path.unlink, "fsdp_config.json is missing"),
    "empty layout": ("fsdp_config.json", lambda p: p.write_text(""), "fsdp_config.json cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_offered(saved, tmp_path, damage):
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    name, spoil, message = DAMAGE[damage]
    folder = root / "global_step_2" / "actor"
    spoil(folder / name)
    problems = verify_checkpoint(folder)
    assert len(problems) == 1
    with pytest.raises(AssertionError, match=message):
        assert not problems, problems[0]
    model, optimizer, _, manager = make(9)
    before = state_of(model, optimizer)
    with pytest.raises(CheckpointError, match=f"{message}.*trainer.resume_from_path={root}/global_step_1$"):
        manager.load_checkpoint(str(folder))
    torch.testing.assert_close(state_of(model, optimizer), before, atol=0, rtol=0)
    assert find_complete_checkpoints(root) == [str(root / "global_step_1")]


def test_what_else_cannot_be_loaded(saved, tmp_path):
    folder = str(saved / "global_step_2" / "actor")
    with pytest.raises(CheckpointError, match="the folder .*nowhere does not exist.*resume_mode=disable"):
        make(0)[-1].load_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(
        CheckpointError, match=r"another model: parts\.embed\.weight has shape \(7, 6\) there and \(7, 8\)"
    ):
        make(0, width=8)[-1].load_checkpoint(folder)
    model, optimizer, schedule, _ = make(0)
    model.parts["more"] = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors, such as parts\.more\.bias"):
        FSDPCheckpointManager(model, optimizer, schedule).load_checkpoint(folder)
    model, _, schedule, _ = make(0)
    with pytest.raises(CheckpointError, match=r"groups of \[2, 3\] parameters there, \[5\] here"):
        FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()), schedule).load_checkpoint(folder)
    with pytest.raises(ValueError, match="names the optimizer, but this model has none"):
        FSDPCheckpointManager(model).load_checkpoint(folder)
    with pytest.raises(ValueError, match=r"checkpoint\.save_contents=.* unknown parts \['weights'\]"):
        FSDPCheckpointManager(model, checkpoint_config={"save_contents": ["weights"]})
    with pytest.raises(ValueError, match="needs local_path or hdfs_path"):
        BaseCheckpointManager.checkpath(None, None)


def test_weights_of_a_run_that_diverged_are_not_resumed(tmp_path):
    model, optimizer, _, manager = make(0)
    for step in (1, 2):
        manager.save_checkpoint(str(tmp_path / f"global_step_{step}"), global_step=step)
        with torch.no_grad():
            model.parts["embed"].weight[1, 2] = float("nan")
    before = state_of(*make(9)[:2])
    other, optimizer, _, manager = make(9)
    with pytest.raises(CheckpointError, match=r"NaN in parts\.embed\.weight: .*resume_from_path=.*global_step_1$"):
        manager.load_checkpoint(str(tmp_path / "global_step_2"))
    torch.testing.assert_close(state_of(other, optimizer), before, atol=0, rtol=0)


def test_a_buffer_with_infinity_is_a_mask(tmp_path):
    def masked(seed):
        model, optimizer, schedule, _ = make(seed)
        model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        return model, FSDPCheckpointManager(model, optimizer, schedule)

    model, manager = masked(0)
    manager.save_checkpoint(str(tmp_path / "global_step_1"), global_step=1)
    other, manager = masked(9)
    manager.load_checkpoint(str(tmp_path / "global_step_1"))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), atol=0, rtol=0)


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/verl_checkpoint_ran_code"),))


def test_a_file_cannot_run_code(saved, tmp_path):
    folder = tmp_path / "actor"
    shutil.copytree(saved / "global_step_1" / "actor", folder)
    torch.save(Malicious(), folder / MODEL)
    manifest = json.loads((folder / MANIFEST).read_text())
    from verl.utils.checkpoint.files import record_file

    fresh = record_file(folder, MODEL)
    for entry in manifest["files"]:
        if entry["name"] == MODEL:
            entry |= {"num_bytes": fresh.num_bytes, "crc32": fresh.crc32}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert verify_checkpoint(folder) == []
    with pytest.raises(CheckpointError, match=f"{MODEL} cannot be read"):
        make(0)[-1].load_checkpoint(str(folder))
    assert not Path("/tmp/verl_checkpoint_ran_code").exists()


def test_contents_are_respected(saved, tmp_path):
    model, optimizer, schedule, manager = make(1, config={"save_contents": ["model"]})
    assert manager.should_save_model and not manager.should_save_optimizer and manager.load_contents == ["model"]
    train(model, optimizer, schedule, 1)
    manager.save_checkpoint(str(tmp_path / "global_step_1"), global_step=1)
    assert {p.name for p in (tmp_path / "global_step_1").glob("*.pt")} == {MODEL}
    with pytest.raises(CheckpointError, match="extra_state_.*pt was never saved: leave that part out of"):
        make(2)[-1].load_checkpoint(str(tmp_path / "global_step_1"))
    assert find_complete_checkpoints(tmp_path) == [str(tmp_path / "global_step_1")]

    other, other_optimizer, _, loader = make(3, config=SimpleNamespace(load_contents=["model"]))
    draws = torch.get_rng_state()
    loader.load_checkpoint(str(saved / "global_step_2" / "actor"))
    assert torch.equal(torch.get_rng_state(), draws) and not other_optimizer.state
    kept, *_ = make(4)
    FSDPCheckpointManager(kept, checkpoint_config={"save_contents": ["model"]}).load_checkpoint(
        str(saved / "global_step_2" / "actor"), del_local_after_load=False
    )
    torch.testing.assert_close(kept.state_dict(), other.state_dict(), atol=0, rtol=0)


def test_an_interrupted_save_is_not_complete(tmp_path, monkeypatch):
    """A save that dies half way, first into an empty folder, then over a complete checkpoint."""
    folder = tmp_path / "global_step_1"
    *_, manager = make(0)
    monkeypatch.setenv("VERL_FAULT", "raise:save_checkpoint:rank=0:step=1")
    with pytest.raises(InjectedFault):
        manager.save_checkpoint(str(folder), global_step=1)
    assert verify_checkpoint(folder) == ["fsdp_config.json is missing"]
    manager.save_checkpoint(str(folder), global_step=1)
    assert verify_checkpoint(folder) == []
    monkeypatch.setenv("VERL_FAULT", "raise:save_checkpoint:rank=0:step=2")
    with pytest.raises(InjectedFault):
        manager.save_checkpoint(str(folder), global_step=2)
    assert "did not finish writing" in verify_checkpoint(folder)[0]
    assert find_complete_checkpoints(tmp_path) == []


def test_a_save_takes_its_place_and_leaves_what_is_not_its_own(tmp_path):
    """Files and links in the place of its folders, folders in the place of its files, and parts of an older save."""
    *_, manager = make(0, config={"save_contents": ["model", "optimizer", "extra"]})
    step = tmp_path / "global_step_2"
    step.write_text("mine")
    folder = step / "actor"
    manager.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and (tmp_path / "global_step_2.aside.1").read_text() == "mine"
    shutil.rmtree(folder)
    folder.write_text("mine")
    manager.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and (step / "actor.aside.1").read_text() == "mine"
    shutil.rmtree(folder)

    own = tmp_path / "my own"
    own.mkdir()
    (folder / MODEL).mkdir(parents=True)
    (folder / "huggingface").symlink_to(own)
    (folder / "notes.tmp").mkdir()
    (folder / "notes.txt.tmp").touch()
    for name in ("mine_world_size_4_rank_0.pt", "megatron_config.json", "manifest_world_size_1_rank_0.json"):
        (folder / name).mkdir()
    (folder / "lora_adapter").mkdir()  # of a run with adapters that saved this step before
    (folder / "lora_adapter" / "adapter_config.json").touch()
    manager.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and not any(own.iterdir())
    kept = {"notes.tmp", "notes.txt.tmp", f"{MODEL}.aside.1", "huggingface.aside.1", "mine_world_size_4_rank_0.pt"}
    kept |= {"megatron_config.json.aside.1", "manifest_world_size_1_rank_0.json.aside.1"}
    assert kept <= {path.name for path in folder.iterdir()} and not (folder / "lora_adapter").exists()

    (folder / "huggingface" / "model.safetensors").touch()  # of a run that saved hf_model
    manager.save_checkpoint(str(folder), global_step=2)
    assert not list(folder.glob("huggingface/*")) and verify_checkpoint(folder) == []
    (folder / "huggingface" / "model.safetensors").touch()  # that this run has started from
    manager.source_folder = str(folder / "huggingface")
    manager.save_checkpoint(str(folder), global_step=2)
    assert list(folder.glob("huggingface/model.safetensors")) and verify_checkpoint(folder) == []
    *_, other = make(1)
    other.load_checkpoint(str(folder))


def test_a_full_disk_is_named(tmp_path):
    """Files above 2000 bytes cannot be written: the error names the file, and nothing half is left."""
    import resource

    *_, manager = make(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: free disk space.*{MODEL}"):
            manager.save_checkpoint(str(tmp_path / "full"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "full").iterdir()) == []


def test_retention(tmp_path):
    """The oldest complete ones go, when the new one is complete; incomplete and later ones stay."""
    *_, manager = make(0, config={"save_contents": ["model"]})
    place = lambda step: tmp_path / f"global_step_{step}" / "critic"  # noqa: E731
    for step in (1, 2, 3, 9):
        manager.save_checkpoint(str(place(step)), global_step=step)
    (place(2) / MODEL).unlink()
    *_, restarted = make(0, config={"save_contents": ["model"]})
    restarted.save_checkpoint(str(place(4)), global_step=4, max_ckpt_to_keep=2)
    assert [step for step in (1, 2, 3, 4, 9) if place(step).exists()] == [2, 3, 4, 9]
    restarted.save_checkpoint(str(place(5)), global_step=5, max_ckpt_to_keep=1)
    assert [step for step in (2, 3, 4, 5, 9) if place(step).exists()] == [2, 5, 9]
    restarted.load_checkpoint(str(place(5)), del_local_after_load=True)
    assert not place(5).exists()
    restarted.save_checkpoint(str(tmp_path / "elsewhere"), max_ckpt_to_keep=1)
    assert (tmp_path / "elsewhere").exists() and place(9).exists()


def test_remote_copy(tmp_path):
    *_, manager = make(0)
    for _ in range(2):  # as a run that starts anew beside an older one
        manager.save_checkpoint(str(tmp_path / "here"), hdfs_path=str(tmp_path / "remote" / "there"))
    assert verify_checkpoint(tmp_path / "remote" / "there") == []


def test_huggingface_folder_is_read_by_from_pretrained(tmp_path):
    """Exported weights give the logits of the model that was exported; the head is tied and stored once."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    manager = FSDPCheckpointManager(model, checkpoint_config={"save_contents": ["model", "hf_model"]})
    manager.save_checkpoint(str(tmp_path / "one"))
    assert verify_checkpoint(tmp_path / "one") == []
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "one" / "huggingface", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=0, rtol=0)
