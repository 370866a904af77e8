"""What the FSDP engine does beyond a training step: checkpoints, bad input, schedules, skipped steps."""

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.workers.engine import cases
from verl.base_config import ConfigError
from verl.utils import activation_offload
from verl.utils.checkpoint import verify_checkpoint
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine import BaseEngine, passes
from verl.workers.engine.fsdp import forward
from verl.workers.engine.fsdp.engine import build_scheduler

CUT = cases.MICRO[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "plain"
    cases.write_model(path)
    return path


def step(engine: BaseEngine, loss: Any = cases.loss_fn) -> dict[str, float]:
    with engine.train_mode():
        metrics = engine.train_batch(cases.batch(**CUT), loss)
        engine.lr_scheduler_step()
    return metrics


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4, "lora_alpha": 8}], ids=["whole", "adapters"])
def test_checkpoint_continues_bit_for_bit(folder: Path, tmp_path: Path, model: dict[str, Any]) -> None:
    engine = cases.build(folder, model)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    expected = step(engine)
    other = cases.build(folder, model)
    version = other.weights_version
    other.load_checkpoint(str(tmp_path / "actor"))
    assert other.weights_version != version
    assert step(other) == expected
    weights = dict(engine.named_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in other.named_weights())


SAVED = {"lr": 1e-2, "weight_decay": 0.01, "betas": (0.9, 0.999), "lr_warmup_steps": 4}
CHANGED = {"lr": 3e-2, "weight_decay": 0.2, "betas": (0.8, 0.95)}
LONGER = {"lr_scheduler_type": "cosine", "total_training_steps": 10}


@pytest.mark.parametrize(
    ("saved", "changed", "keeps"),
    [
        (SAVED, CHANGED, False),
        (SAVED, CHANGED, True),
        (SAVED, {"lr_warmup_steps": 2}, False),
        (SAVED | LONGER, {"total_training_steps": 20}, False),
        (SAVED | LONGER, {"total_training_steps": 20, "min_lr_ratio": 0.1, "lr_warmup_steps": 2}, False),
        (SAVED | LONGER, {"total_training_steps": 20, "min_lr_ratio": 0.1, "lr_warmup_steps": 2}, True),
        (SAVED, {"lr_scheduler_type": "cosine", "total_training_steps": 8, "lr": 3e-2}, False),
        (SAVED | LONGER, {"lr_scheduler_type": "constant"}, True),
        (SAVED | {"lr": 0.0}, {"lr": 1e-2}, False),
        (SAVED, {}, False),
    ],
)
def test_a_resumed_run_has_the_settings_of_its_configuration(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: Any, changed: Any, keeps: bool
) -> None:
    """Its rates are those of a run that had them from the start, unless it keeps those of the checkpoint."""
    engine = cases.build(folder, optimizer=saved)
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=3)
    options = {"use_checkpoint_opt_param_scheduler": keeps}
    resumed: Any = cases.build(folder, optimizer=saved | changed | options)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    chosen = saved if keeps else saved | changed
    rates = expected_rates(chosen, 9)
    for done in range(3, 6):
        (group,) = resumed.optimizer.param_groups
        assert group["lr"] == resumed.lr_scheduler.get_last_lr()[0] == pytest.approx(rates[done], rel=1e-12)
        assert (group["weight_decay"], group["betas"]) == (chosen["weight_decay"], chosen["betas"])
        step(resumed)
    for key in changed.keys() & saved.keys():
        assert f"optim.{key}={_as_text(changed[key])}, and was {_as_text(saved[key])} in the checkpoint" in caplog.text
    assert bool(changed) == ("in the checkpoint" in caplog.text)
    # the settings that were kept are still those of the checkpoint for the next resume
    resumed.save_checkpoint(str(tmp_path / "again"), global_step=6)
    for again in (True, False):
        last: Any = cases.build(folder, optimizer=saved | changed | {"use_checkpoint_opt_param_scheduler": again})
        last.load_checkpoint(str(tmp_path / "again"))
        config = chosen if again else saved | changed
        assert last.optimizer.param_groups[0]["weight_decay"] == config["weight_decay"]
        assert last.lr_scheduler.get_last_lr() == pytest.approx([expected_rates(config, 9)[6]], rel=1e-12)


def expected_rates(settings: Any, count: int) -> list[float]:
    """Return the rates that schedules of transformers give."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings["lr"])
    warmup = settings["lr_warmup_steps"]
    if settings.get("lr_scheduler_type") == "cosine":
        rate, total = settings.get("min_lr_ratio", 0.0), settings["total_training_steps"]
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr_rate=rate)
    else:
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    rates = []
    for _ in range(count):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return rates


def _as_text(value: Any) -> str:
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OTHER_ROPE = "rope_parameters.rope_theta=500000.0, and 10000.0"


@pytest.mark.parametrize(
    ("saved", "changed", "named"),
    [
        ({}, {"override_config": ROPE}, f"{OTHER_ROPE} in the checkpoint"),
        ({"lora_rank": 2}, {"override_config": ROPE}, f"{OTHER_ROPE} in the checkpoint"),
        ({}, {"override_config": {"rms_norm_eps": 1e-3}}, "rms_norm_eps=0.001, and 1e-06 in the checkpoint"),
        ({"lora_rank": 2}, {"lora_alpha": 4}, "lora_alpha=4, and 16 in the checkpoint"),
        ({}, {"override_config": {"use_cache": False, "max_position_embeddings": 99}}, None),
    ],
)
def test_other_values_of_the_forward_are_another_model(
    folder: Path, tmp_path: Path, saved: Any, changed: Any, named: str | None
) -> None:
    cases.build(folder, saved).save_checkpoint(str(tmp_path / "actor"), global_step=1)
    resumed = cases.build(folder, saved | changed)
    if named is None:
        resumed.load_checkpoint(str(tmp_path / "actor"))
        return
    with pytest.raises(ValueError, match=re.escape(f"another model: this run's has {named}")):
        resumed.load_checkpoint(str(tmp_path / "actor"))


def test_other_values_of_the_forward_are_another_critic(folder: Path, tmp_path: Path) -> None:
    cases.build(folder, kind="value_model").save_checkpoint(str(tmp_path / "critic"), global_step=1)
    cases.build(folder, kind="value_model").load_checkpoint(str(tmp_path / "critic"))
    with pytest.raises(ValueError, match=re.escape(f"another model: this run's has {OTHER_ROPE} in the checkpoint")):
        cases.build(folder, {"override_config": ROPE}, kind="value_model").load_checkpoint(str(tmp_path / "critic"))


def test_a_buffer_that_the_file_lacks_starts_as_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And layers that predict further tokens, which follow the last layer, are left out."""
    cases.write_family(tmp_path, "Glm4Moe", cases.SIGMOID)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    lacking = "model.layers.1.mlp.gate.e_score_correction_bias"
    further = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.enorm.weight": torch.ones(64)}
    save_file({name: t for name, t in weights.items() if name != lacking} | further, file, metadata={"format": "pt"})
    exported = cases.export(cases.build(tmp_path))
    assert f"lacks 1 buffers of the model, the first is '{lacking}'" in caplog.text
    assert exported.keys() == weights.keys()
    weights[lacking] = torch.zeros(8)
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


def test_older_checkpoints_are_removed_when_they_may_go(folder: Path, tmp_path: Path) -> None:
    engine = cases.build(folder)
    places = [tmp_path / f"global_step_{number}" / "actor" for number in (1, 2)]
    for number, place in enumerate(places, start=1):
        engine.save_checkpoint(str(place), global_step=number)
    engine.keep_latest_checkpoints(str(places[1]), None)
    assert all(place.is_dir() for place in places)
    engine.keep_latest_checkpoints(str(places[1]), 1)
    assert [place.is_dir() for place in places] == [False, True]


def test_the_rows_of_a_pass_stay_on_the_host() -> None:
    host = passes.MicroBatch(cases.batch([3, 1]), [3, 1])
    moved = host.to(torch.device("meta"))
    assert {tensor.device.type for tensor in passes.tensors_of(moved.rows).values()} == {"meta"}
    assert {tensor.device.type for tensor in passes.tensors_of(host.rows).values()} == {"cpu"}
    assert moved.index == host.index and moved.rows.meta_info == host.rows.meta_info


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_of_padding_alone_in_its_micro_batch_changes_nothing(folder: Path, packed: bool) -> None:
    """As an aborted request comes back; the others have the outputs that they have without it."""
    engine = cases.build(folder, {"use_remove_padding": packed})
    data, others = cases.batch(micro_batch_size_per_gpu=1), [0, 1, 2, 4, 5, 6, 7]
    for name in ("attention_mask", "response_mask"):
        data.batch[name][3] = 0
    with engine.eval_mode():
        found = engine.infer_batch(data)["log_probs"]
        expected = engine.infer_batch(cases.batch(others, micro_batch_size_per_gpu=1))["log_probs"]
    assert not found[3].any() and torch.equal(found[others], expected)
    with engine.train_mode():
        apart = engine.train_batch(data, cases.loss_fn)
    data.meta_info["micro_batch_size_per_gpu"], other = 8, cases.build(folder, {"use_remove_padding": packed})
    with other.train_mode():
        assert apart == pytest.approx(other.train_batch(data, cases.loss_fn), rel=1e-5)


def test_adapter_is_saved_as_peft_reads_it(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = cases.build(folder, {"lora_rank": 4, "lora_alpha": 8})
    step(engine)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    base = AutoModelForCausalLM.from_pretrained(folder)
    merged = PeftModel.from_pretrained(base, tmp_path / "lora_adapter").merge_and_unload().state_dict()
    for name, tensor in cases.export(engine).items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)
    assert json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())["r"] == 4
    assert verify_checkpoint(tmp_path) == []
    (tmp_path / "lora_adapter" / "adapter_model.safetensors").write_bytes(b"")
    assert "lora_adapter/adapter_model.safetensors has 0 bytes" in verify_checkpoint(tmp_path)[0]


@pytest.mark.parametrize(("model", "forwards"), [({}, 1), ({"enable_gradient_checkpointing": True}, 2)])
def test_checkpointing_computes_layers_again(folder: Path, model: dict[str, Any], forwards: int) -> None:
    """Its numbers are those without it (test_engine_contract.py); this is what it does."""
    engine = cases.build(folder, model)
    calls: list[int] = []
    engine.module.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with engine.train_mode():
        engine.train_batch(cases.batch(**CUT), cases.loss_fn)
    assert len(calls) == forwards * 2  # micro-batches


def test_a_step_that_is_not_finite_is_skipped_and_counted(folder: Path) -> None:
    engine = cases.build(folder)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}

    def broken(output: Any, rows: Any) -> Any:
        terms, metrics = cases.loss_fn(output, rows)
        terms[0] = type(terms[0])(terms[0].total * float("nan"), terms[0].unit)
        return terms, metrics

    metrics = step(engine, broken)
    assert metrics["skipped_steps"] == 1 and engine.weights_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    assert step(engine)["skipped_steps"] == 1 and engine.weights_version == 1


def test_forward_only_metrics_and_no_optimizer(folder: Path) -> None:
    engine = cases.build(folder, engine={"forward_only": True})
    with engine.eval_mode():
        metrics = engine.forward_backward_batch(cases.batch(**CUT), cases.loss_fn, forward_only=True)
    assert metrics["loss"] == pytest.approx(cases.reference_step(_plain(folder))["metrics"]["loss"], rel=1e-5)
    with pytest.raises(RuntimeError, match="forward_only"):
        engine.optimizer_step()
    with pytest.raises(RuntimeError, match="lora_rank"):
        engine.disable_adapter()


def _plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_file_of_torch_save_is_checked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    engine = cases.build(tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in cases.export(engine).items())
    tensors["model.norm.weight"][3] = float("nan")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"tensor 'model.norm.weight' in {tmp_path}/pytorch_model.bin holds NaN"):
        cases.build(tmp_path)
    torch.save({"model.norm.weight": _Attack(tmp_path / "made")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"{tmp_path}/pytorch_model.bin .*UnpicklingError.* holds more than tensors"):
        cases.build(tmp_path)
    assert not (tmp_path / "made").exists()


class _Attack:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _spoil(folder: Path, how: str) -> str:
    """Damage a checkpoint; returns what the message must name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "missing":
        file.unlink()
        return "model.path"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return "model.safetensors.*truncated"
    if how == "lacks a tensor":
        del tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        return "model.norm.weight"
    if how in ("NaN", "infinity"):
        tensors["model.layers.1.mlp.up_proj.weight"][5, 3] = float(how)
        save_file(tensors, file, metadata={"format": "pt"})
        return f"'model.layers.1.mlp.up_proj.weight' in {file} holds {how}"
    if how.startswith("index"):
        index = {"weight_map": dict.fromkeys(tensors, file.name) | {"model.norm.weight": "../secret"}}
        text = {"index of another form": "[]", "index that leaves the folder": json.dumps(index)}[how]
        (folder / "model.safetensors.index.json").write_text(text)
        return "model.safetensors.index.json is not an index of weight files"
    if how == "wrong index":
        del tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        index = {"weight_map": dict.fromkeys([*tensors, "model.norm.weight"], file.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return f"{file} lacks the tensor 'model.norm.weight' that model.safetensors.index.json says it holds"
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return r"lm_head.weight.*\(96, 64\).*\(97, 64\)"


SPOILT = ["missing", "truncated", "lacks a tensor", "wrong shape", "NaN", "infinity"]
SPOILT += ["wrong index", "index of another form", "index that leaves the folder"]


@pytest.mark.parametrize("how", SPOILT)
def test_bad_weights_are_named(tmp_path: Path, how: str) -> None:
    cases.write_model(tmp_path)
    expected = _spoil(tmp_path, how)
    with pytest.raises(ValueError, match=expected):
        cases.build(tmp_path)


def test_rows_of_a_model_with_states_are_not_packed(tmp_path: Path) -> None:
    shape = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    cases.write_family(tmp_path, "Lfm2", shape)
    with pytest.raises(ConfigError, match=r"use_remove_padding=true: would carry states .* layers of type conv"):
        cases.build(tmp_path, {"use_remove_padding": True})
    engine = cases.build(tmp_path, {"use_remove_padding": False})
    with engine.eval_mode():
        found = engine.infer_batch(cases.batch(**CUT))
    expected = cases.reference_step(cases.load(tmp_path))["output"]
    torch.testing.assert_close(found["log_probs"], expected["log_probs"], atol=1e-5, rtol=1e-5)


def test_bad_requests_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2 must divide the 1 ranks"):
        cases.build(folder, engine={"ulysses_sequence_parallel_size": 2})
    with pytest.raises(ValueError, match="target_modules='nothing'"):
        cases.build(folder, {"lora_rank": 2, "target_modules": "nothing"})
    engine = cases.build(folder)
    data = cases.batch(**CUT)
    data.batch["response_mask"][1, 5] = 1  # behind the end of the response
    with pytest.raises(ValueError, match="token 5 of row 1"):
        engine.infer_batch(data)
    with pytest.raises(ValueError, match="max_token_len_per_gpu"):
        engine.infer_batch(cases.batch(use_dynamic_bsz=True))


@pytest.fixture
def own_group() -> Iterator[None]:
    """End the group of one process that a wrapped engine starts."""
    yield
    torch.distributed.destroy_process_group()


def test_one_process_with_offload_or_in_half_precision(folder: Path, own_group: None) -> None:
    """CPU offload changes nothing; half precision in the layers, fp32 weights and gradients around them."""
    expected = cases.reference_step(_plain(folder))
    offloaded = cases.build(folder, engine={"offload_policy": True})
    assert step(offloaded) == pytest.approx(expected["metrics"], rel=1e-5)
    mixed = cases.build(folder, engine={"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}})
    metrics = step(mixed)
    assert metrics == pytest.approx(expected["metrics"], rel=0.05)
    assert metrics != pytest.approx(expected["metrics"], rel=1e-5)
    assert all(tensor.dtype == torch.float32 for _, tensor in mixed.named_weights())
    with pytest.raises(ValueError, match="transformer_layer_cls_to_wrap"):
        cases.build(folder, engine={"wrap_policy": {"transformer_layer_cls_to_wrap": ["No"]}, "offload_policy": True})


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_no_gathered_weight_goes_to_the_host_with_the_activations(
    folder: Path, own_group: None, monkeypatch: pytest.MonkeyPatch, checkpointing: bool, lora_rank: int
) -> None:
    """All activations move and come back as copies, and the numbers are those of a pass that keeps them."""
    moved: list[bool] = []
    kept: list[torch.Size] = []

    def to_host(tensor: Tensor, pin_memory: bool) -> Tensor:
        here = [p for p in engine.module.parameters() if not isinstance(p, DTensor)]  # gathered at this moment
        memory = {p.untyped_storage().data_ptr() for p in here}
        moved.append(tensor.untyped_storage().data_ptr() in memory)
        return tensor.clone()

    def keep(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and not isinstance(tensor._base, torch.nn.Parameter):
            kept.append(tensor.shape)
        return tensor

    def kept_activations(model: torch.nn.Module, pin_memory: bool) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)

    monkeypatch.setattr(activation_offload, "_to_host", to_host)
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    model = {"enable_gradient_checkpointing": checkpointing, "lora_rank": lora_rank, "lora_alpha": 8}
    settings = (model | {"enable_activation_offload": True}, {"offload_policy": True})
    with monkeypatch.context() as patch:
        patch.setattr(forward, "offloaded_activations", kept_activations)
        expected = step(cases.build(folder, *settings))
    engine = cases.build(folder, *settings)
    assert isinstance(engine.module, FSDPModule)
    assert step(engine) == expected
    assert kept and len(moved) == len(kept) and not any(moved)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0]),
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.25, "total_training_steps": 16}, [0.0, 0.25, 0.5, 0.75]),
        ({"lr_scheduler_type": "cosine", "total_training_steps": 2, "min_lr_ratio": 0.2}, [1.0, 0.6, 0.2]),
    ],
)
def test_schedules(changes: dict[str, Any], expected: list[float]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_scheduler(optimizer, FSDPOptimizerConfig(lr=1.0, **changes))
    rates = []
    for _ in expected:
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_schedules_that_need_a_length_say_so(changes: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="total_training_steps"):
        build_scheduler(optimizer, FSDPOptimizerConfig(**changes))


def test_deterministic_algorithms_and_rows_at_once(folder: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        patch.setenv("FLASH_ATTENTION_DETERMINISTIC", "")
        try:
            cases.build(folder)
            assert torch.are_deterministic_algorithms_enabled() == before[0]
            cases.build(folder, engine={"full_determinism": True})
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    plain = cases.build(folder, engine={"entropy_from_logits_chunk_size": 5})
    chunks = {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 5}
    rows = cases.build(folder, engine=chunks)
    assert plain.forward.entropy_chunk_size is None and rows.forward.entropy_chunk_size == 5
    assert step(rows) == pytest.approx(step(plain), rel=1e-5)
