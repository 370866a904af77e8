"""What the Megatron-Core engine does beyond the contract: bad input, schedules, skipped steps, reward models."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine import cases, megatron_cases, test_value_heads
from verl.model_merger.__main__ import main
from verl.workers.config import McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import BaseEngine, EngineRegistry, MegatronEngineWithLMHead
from verl.workers.engine.background_load import fill, load_in_background

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

CUT = cases.MICRO[4]
FULL = {"override_transformer_config": megatron_cases.RECOMPUTE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("engine") / "plain"
    cases.write_model(path)
    yield path
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def step(engine: BaseEngine, loss: Any = cases.loss_fn) -> dict[str, float]:
    with engine.train_mode():
        return engine.train_batch(cases.batch(**CUT), loss)


def test_a_step_that_is_not_finite_is_skipped_and_counted(folder: Path) -> None:
    engine = megatron_cases.build(folder, {})
    before = cases.export(engine)

    def broken(output: Any, rows: Any) -> Any:
        terms, metrics = cases.loss_fn(output, rows)
        terms[0] = type(terms[0])(terms[0].total * float("nan"), terms[0].unit)
        return terms, metrics

    assert step(engine, broken)["skipped_steps"] == 1 and engine.weights_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    assert step(engine)["skipped_steps"] == 1 and engine.weights_version == 1


def test_forward_only_metrics_and_no_optimizer(folder: Path) -> None:
    engine = megatron_cases.build(folder, {"forward_only": True})
    with engine.eval_mode():
        metrics = engine.forward_backward_batch(cases.batch(**CUT), cases.loss_fn, forward_only=True)
    assert metrics["loss"] == pytest.approx(cases.reference_step(cases.load(folder))["metrics"]["loss"], rel=1e-5)
    with pytest.raises(RuntimeError, match="forward_only"):
        engine.optimizer_step()
    with pytest.raises(RuntimeError, match="lora_rank"):
        next(engine.named_weights(adapter_only=True))


def test_an_actor_around_modules_fuses_their_head(folder: Path) -> None:
    """The engine that built them goes on with the plain head."""
    from verl.workers.actor.megatron_actor import MegatronPPOActor

    engine: Any = megatron_cases.build(folder, {})
    config = McoreActorConfig(ppo_micro_batch_size_per_gpu=1, use_fused_kernels=True)
    actor = MegatronPPOActor(config, None, engine.hf_config, None, engine.module)
    expected = cases.reference_loss(cases.load(folder))[1]
    found = actor.compute_log_prob(cases.batch(micro_batch_size=3), calculate_entropy=True)
    assert actor.engine.forward.fuses_head and not engine.forward.fuses_head
    assert actor.engine.finish_checkpoint(wait=False)  # it has no model files to write, and none are asked for
    with engine.eval_mode():
        plain = engine.infer_batch(cases.batch(**CUT))
    for each, name in zip(found, ("log_probs", "entropy"), strict=True):
        torch.testing.assert_close(each, expected[name].detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(plain[name], expected[name].detach(), atol=1e-5, rtol=1e-5)


def test_positions_are_scaled_linearly_as_in_transformers(folder: Path, tmp_path: Path) -> None:
    """Scaling of type llama3 and yarn is in the contract."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    cases.write_model(tmp_path, rope_parameters=rope)
    found = []
    for each in (tmp_path, folder):
        engine = megatron_cases.build(each, {"forward_only": True})
        with engine.eval_mode():
            found.append(engine.infer_batch(cases.batch(**CUT))["log_probs"])
        expected = cases.reference_loss(cases.load(each))[1]["log_probs"].detach()
        torch.testing.assert_close(found[-1], expected, atol=2e-6, rtol=0)
    assert (found[0] - found[1]).abs().max() > 1e-4


def selective(*modules: str) -> dict[str, Any]:
    recompute = {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return {"override_transformer_config": recompute}


@pytest.mark.parametrize(("settings", "forwards"), [({}, 1), (FULL, 2), (selective("mlp"), 2), (selective(), 1)])
def test_recompute_computes_layers_again(folder: Path, settings: dict[str, Any], forwards: int) -> None:
    """Its numbers are those without it (test_megatron_contract.py too); this is what it does."""
    engine = megatron_cases.build(folder, settings)
    calls: list[int] = []
    engine.models[0].decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert step(engine) == step(megatron_cases.build(folder, {}))
    assert len(calls) == forwards * 2  # micro-batches


def test_masks_of_heads_come_from_the_state_of_their_tensor_parallel_rank(folder: Path) -> None:
    """The state that all ranks of a layer share stays; computing layers again draws the same masks again."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from verl.workers.engine.megatron import layout

    model = cases.model_config(folder, override_config={"attention_dropout": 0.2})
    results = []
    for settings in ({}, FULL):
        engine = megatron_cases.build(folder, settings, model=model)
        layout._seed(42, engine.layout)
        shared, own = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        results.append(step(engine))
        assert torch.equal(torch.get_rng_state(), shared)
        assert not torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], own)
    assert results[0] == results[1] != step(megatron_cases.build(folder, {}))


@pytest.mark.parametrize("frozen", [False, True])
def test_routers_can_be_kept(tmp_path: Path, folder: Path, frozen: bool) -> None:
    megatron_cases.write_models(tmp_path)
    model = cases.model_config(tmp_path / "qwen3_moe", override_config={"moe_config": {"freeze_moe_router": frozen}})
    engine = megatron_cases.build(tmp_path / "qwen3_moe", {}, model=model)
    before = cases.export(engine)
    step(engine)
    moved = {name for name, tensor in engine.named_weights() if not torch.equal(tensor, before[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 4 and moved == set(before) - (routers if frozen else set())


def test_attention_is_computed_again_alone(folder: Path) -> None:
    engine = megatron_cases.build(folder, selective("core_attn"))
    calls: list[int] = []
    attention = engine.models[0].decoder.layers[1].self_attention
    attention.core_attention.register_forward_pre_hook(lambda *_: calls.append(1))
    attention.linear_qkv.register_forward_pre_hook(lambda *_: calls.append(100))
    assert step(engine) == step(megatron_cases.build(folder, {}))
    assert sum(calls) == 2 * 100 + 2 * 2  # micro-batches


def test_gradients_can_be_reduced_while_the_backward_pass_runs(folder: Path) -> None:
    """Over two micro-batches, of which only the last reduces, in buckets of about a layer."""
    options = {"overlap_grad_reduce": True, "bucket_size": 30000}
    plain, early = (
        megatron_cases.build(folder, {"override_ddp_config": each, "use_distributed_optimizer": False})
        for each in ({}, options)
    )
    assert len(early.module[0].buffers[0].buckets) > 1 and early.models[0].config.no_sync_func is not None
    for _ in range(2):
        assert step(early) == step(plain)
    assert all(torch.equal(tensor, dict(plain.named_weights())[name]) for name, tensor in early.named_weights())


def test_gradients_that_an_optimizer_keeps_elsewhere_are_clipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``use_precision_aware_optimizer``, whose kernels are of CUDA."""
    engine: Any = megatron_cases.build(folder, {}, optimizer={"clip_grad": 1e-3})
    prepare, seen = engine.optimizer.prepare_grads, list[torch.Tensor]()

    def move() -> Any:
        found = prepare()
        for parameter in (p for each in engine.optimizer.chained_optimizers for p in each.get_parameters()):
            parameter.decoupled_grad = parameter.grad.clone()
            seen.append(parameter.decoupled_grad)
        return found

    monkeypatch.setattr(engine.optimizer, "prepare_grads", move)
    norm = step(engine)["grad_norm"]
    assert norm > 0.1 and torch.cat([grad.flatten() for grad in seen]).norm() == pytest.approx(1e-3, rel=1e-3)


def test_weights_come_from_the_seed_where_none_are_loaded(folder: Path) -> None:
    def fresh(seed: int) -> Any:
        engine = EngineRegistry.new(
            "language_model",
            "megatron",
            model_config=cases.model_config(folder),
            engine_config=McoreEngineConfig(seed=seed, forward_only=True),
            optimizer_config=None,
            checkpoint_config=None,
            load_weight=False,
        )
        engine.initialize()
        return cases.export(engine)

    weights, same, other = fresh(1), fresh(1), fresh(2)
    assert weights.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, same[name])
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0))
        else:
            assert 0.018 < tensor.std() < 0.022 and not torch.equal(tensor, other[name])


def test_half_precision_keeps_an_fp32_copy(folder: Path) -> None:
    """Steps that bf16 cannot hold add up in the optimizer."""
    engine = megatron_cases.build(folder, {"dtype": "bf16"}, optimizer={"lr": 1e-4})
    expected = cases.reference_step(cases.load(folder))
    for _ in range(3):
        metrics = step(engine)
    assert metrics["loss"] == pytest.approx(expected["metrics"]["loss"], rel=0.05)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in engine.named_weights())
    main = [p for each in engine.optimizer.chained_optimizers for p in each.get_parameters()]
    assert {p.dtype for p in main} == {torch.float32}
    assert any((p != p.bfloat16()).any() for p in main)


BF16 = {"dtype": "bf16"}
STARTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "fp32": ({}, "language_model", True),
    "value head": ({}, "value_model", True),
    "bf16": (BF16, "language_model", True),
    "bf16, plain optimizer": (BF16 | megatron_cases.PLAIN, "language_model", True),
    "offloaded": (megatron_cases.OFFLOAD, "language_model", False),
    "overlapped": (megatron_cases.OVERLAP, "language_model", False),
}


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("settings, kind, is_late", STARTS.values(), ids=STARTS)
def test_weights_arrive_in_a_thread(
    folder: Path,
    settings: dict[str, Any],
    kind: str,
    is_late: bool,
    is_on_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the optimizer has copied memory that they have not filled yet, unless it must have them."""
    if not is_on_host:
        monkeypatch.setattr("verl.workers.engine.megatron.build.place", cases.as_on_an_accelerator)
    plain = megatron_cases.build(folder, settings, kind)
    goes_on = Event()
    usual = torch.get_default_dtype()
    try:
        with load_in_background():
            fill((), lambda: () if goes_on.wait(300) else None)
            engine: Any = megatron_cases.build(folder, settings, kind)
            if is_late:
                for parameter in engine.models[0].parameters():
                    parameter.data.fill_(torch.nan)
            torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds its model
            goes_on.set()
    finally:
        torch.set_default_dtype(usual)
    for _ in range(2):
        exported = cases.export(engine)
        assert all(torch.equal(tensor, exported[name]) for name, tensor in cases.export(plain).items())
        assert step(engine) == step(plain)


def test_an_engine_of_a_user_finds_its_weights(folder: Path) -> None:
    class Halved(MegatronEngineWithLMHead):
        def initialize(self) -> None:
            super().initialize()
            self.models[0].decoder.final_layernorm.weight.data.mul_(0.5)

    plain: Any = megatron_cases.build(folder, {})
    with load_in_background():
        fill((), cases.slow)
        engine = Halved(plain.model_config, plain.engine_config, plain.optimizer_config)
        engine.initialize()
    halved = cases.export(engine)["model.norm.weight"]
    assert torch.equal(halved, cases.load(folder).model.norm.weight * 0.5)


def bytes_on_device(engine: Any) -> dict[str, int]:
    """Count what the storages of each part hold."""
    offload = engine.offload
    found = {}
    for part, tensors in (("model", offload._parameters), ("grad", offload._gradients), ("optimizer", offload._states)):
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors()}
        found[part] = sum(storages.values())
    return found


@pytest.mark.parametrize("distributed", [True, False])
def test_offload_frees_each_part_by_its_own_switch(folder: Path, distributed: bool) -> None:
    """Half precision has a copy in the optimizer besides. That no number changes is in the contract."""
    settings = {"dtype": "bf16", "use_distributed_optimizer": distributed}
    plain = megatron_cases.build(folder, settings)
    whole, expected = bytes_on_device(plain), step(plain)
    assert whole["grad"] >= 2 * whole["model"] > 0 and whole["optimizer"] >= 5 * whole["model"]
    for part, key in (("model", "param_offload"), ("grad", "grad_offload"), ("optimizer", "optimizer_offload")):
        engine: Any = megatron_cases.build(folder, settings | {key: True})
        assert bytes_on_device(engine) == whole | {part: 0}
        with engine.train_mode():
            assert bytes_on_device(engine) == whole
            with engine.eval_mode():
                pass
            assert bytes_on_device(engine) == whole  # an inner mode takes nothing away
        assert step(engine) == expected
        assert bytes_on_device(engine) == whole | {part: 0}
        exported = dict(engine.named_weights())
        assert all(torch.equal(tensor, exported[name]) for name, tensor in plain.named_weights())
    engine.to("cpu")
    with pytest.raises(RuntimeError, match="model is offloaded: enter train_mode or eval_mode"):
        engine.infer_batch(cases.batch(**CUT))
    engine.to("device")
    assert bytes_on_device(engine) == whole
    assert not engine.offload.is_away("grad")


@pytest.mark.parametrize("kind", ["Token", "Sequence"])
def test_a_reward_model_reads_tokens_where_they_stand(folder: Path, tmp_path: Path, kind: str) -> None:
    """Its head comes from the checkpoint; one for sequences reads the last token, and has no bias."""
    import transformers

    torch.manual_seed(5)
    config = cases.tiny_config(num_labels=1, classifier_dropout=0.0)
    model = getattr(transformers, f"Qwen2For{kind}Classification")(config).eval()
    model.save_pretrained(tmp_path)
    engine = reward_engine(tmp_path)
    engine.initialize()
    with engine.eval_mode():
        found = engine.infer_batch(cases.batch(**CUT))["values"]
    data = cases.tensors()
    inputs = {name: data[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        hidden = model.model(**inputs).last_hidden_state[:, -cases.RESPONSE :]
        expected = model.score(hidden)[..., 0] * data["response_mask"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="lacks 'score.weight'"):
        reward_engine(folder).initialize()
    with pytest.raises(ValueError, match="lacks 'lm_head.weight'"):  # nor is the embedding taken for one
        megatron_cases.build(tmp_path, {})


@pytest.mark.parametrize("name", ["v_head.summary", "value_head", "score"])
def test_a_head_under_another_name_is_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    """By a critic and by a reward model; an unknown one is refused by its name, and a new one is told."""
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    path = test_value_heads.written(folder, tmp_path / "critic", {f"{name}.weight": weight})
    reward = reward_engine(path)
    reward.initialize()
    for engine in (megatron_cases.build(path, {}, "value_model"), reward):
        found = cases.export(engine)
        assert torch.equal(found["score.weight"], weight) and not found["score.bias"].any()
        expected = test_value_heads.expected_values(folder, {f"{name}.weight": weight})
        if engine is not reward:  # which reads tokens where they stand
            torch.testing.assert_close(test_value_heads.values_of(engine), expected, atol=1e-5, rtol=1e-5)


def test_other_heads_are_refused_and_new_ones_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = test_value_heads.written(folder, tmp_path / "critic", {"v_head.0.weight": torch.ones(1, 64)})
    with pytest.raises(ValueError, match=f"model.path={path}: it holds 'v_head.0.weight', of a value head"):
        megatron_cases.build(path, {}, "value_model")
    megatron_cases.build(folder, {}, "value_model")
    assert caplog.text.count(f"model.path={folder}: it holds no value head: a new one starts at random") == 1


def reward_engine(folder: Path) -> Any:
    return EngineRegistry.new(
        "reward_model",
        "megatron",
        model_config=cases.model_config(folder),
        engine_config=megatron_cases.McoreEngineConfig(forward_only=True),
    )


@pytest.mark.parametrize(
    ("name", "expert", "part"),
    [
        ("mlp.experts.local_experts.3.linear_fc1.weight", 3, "linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight11", 11, "linear_fc2.weight"),  # grouped, by Transformer Engine
    ],
)
def test_an_expert_is_told_by_its_name(name: str, expert: int, part: str) -> None:
    from verl.models.mcore.gpt.build import expert_of

    assert expert_of(name) == (expert, part)
    assert expert_of("mlp.shared_experts.linear_fc1.weight") is None and expert_of("mlp.linear_fc1.weight") is None


def test_kernels_of_flash_attn_serve_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnBackend

    from verl.models.mcore.gpt import build

    for installed, latent, expected in ((True, False, "flash"), (True, True, "auto"), (False, False, "auto")):
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name, found=installed: found or None)
        assert build._attention_backend("flash", latent) == AttnBackend[expected]
        assert build._attention_backend("fused", latent) == AttnBackend.fused


def test_bad_requests_are_named(folder: Path) -> None:
    for settings, message in (
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2 x .* must divide the 1 workers"),
        ({"override_ddp_config": {"buckets": 1}}, r"override_ddp_config has unknown keys \['buckets'\]"),
        ({"override_transformer_config": {"deallocate_pipeline_outputs": True}}, "must be false on CPU workers"),
        (selective("layernorm"), r"recompute_modules names \['layernorm'\], which needs Transformer Engine"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2 must be null, 1 or tensor_model_par"),
        ({"override_transformer_config": {"layers": 1}}, r"override_transformer_config has unknown keys \['layers'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            megatron_cases.build(folder, settings)
    with pytest.raises(ValueError, match=r"override_optimizer_config has unknown keys \['epsilon'\]"):
        megatron_cases.build(folder, {}, optimizer={"override_optimizer_config": {"epsilon": 1.0}})
    engine = megatron_cases.build(folder, {})
    data = cases.batch(**CUT)
    data.batch["position_ids"][2] += 1
    with pytest.raises(ValueError, match="position_ids of row 2"):
        engine.infer_batch(data)
    with pytest.raises(ValueError, match="cannot move"):
        engine.to("meta")


def _spoil(folder: Path, how: str) -> str:
    """Damage a checkpoint; returns what the message must name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "missing":
        file.unlink()
        return "model.path.*no model.safetensors"
    if how == "lacks a tensor":
        del tensors["model.norm.weight"]
        expected = "model.norm.weight"
    elif how == "quantized":  # its values mean nothing without the scales beside it
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
            torch.float8_e4m3fn
        )
        expected = r"up_proj.weight.* is quantized \(F8_E4M3\)"
    elif how in ("NaN", "infinity"):
        tensors["model.layers.1.mlp.up_proj.weight"][5, 3] = float(how)
        expected = f"'model.layers.1.mlp.up_proj.weight' in {file} holds {how}"
    else:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        expected = r"lm_head.weight.*\(96, 64\).*\(97, 64\)"
    save_file(tensors, file, metadata={"format": "pt"})
    return expected


@pytest.mark.parametrize("how", ["missing", "lacks a tensor", "quantized", "wrong shape", "NaN", "infinity"])
def test_bad_weights_are_named(folder: Path, tmp_path: Path, how: str) -> None:
    cases.write_model(tmp_path)
    expected = _spoil(tmp_path, how)
    with pytest.raises(ValueError, match=expected):
        megatron_cases.build(tmp_path, {})


def test_a_checkpoint_of_diverged_training_is_neither_merged_nor_trained_from(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = megatron_cases.build(folder, {})
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    (weight,) = (each for full, each in engine.module[0].named_parameters() if full.endswith(name))
    with torch.no_grad():
        weight[2, 1] = torch.nan
    engine.save_checkpoint(str(tmp_path / "global_step_1" / "actor"), global_step=1)
    saved = tmp_path / "global_step_1" / "actor"
    path = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(saved)}
    with pytest.raises(ValueError, match=rf"'{name}' in {saved}/dist_ckpt holds NaN"):
        megatron_cases.build(folder, path)
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(saved), "--target_dir", str(tmp_path / "hf")]
    assert main(arguments) == 2 and not (tmp_path / "hf").exists()
    said = f"checkpoint {saved} holds NaN in model.layers.1.mlp.down_proj.weight: training had diverged"
    assert said in capsys.readouterr().err


def test_checkpoints_that_cannot_be_loaded_say_why(folder: Path, tmp_path: Path) -> None:
    engine = megatron_cases.build(folder, {})
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    other = megatron_cases.build(folder, {"use_distributed_optimizer": False})
    with pytest.raises(ValueError, match="use_distributed_optimizer=true: set the same"):
        other.load_checkpoint(str(tmp_path / "actor"))
    (file,) = (tmp_path / "actor" / "dist_ckpt").glob("__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"__0_0.distcp has \d+ bytes instead of"):
        engine.load_checkpoint(str(tmp_path / "actor"))


def test_what_several_buckets_hold_is_saved_from_where_it_stands(folder: Path, tmp_path: Path) -> None:
    """Some buckets are padded, so that they can be cut."""
    options = {"override_ddp_config": {"overlap_grad_reduce": True, "bucket_size": 30000}}
    engine: Any = megatron_cases.build(folder, options)
    step(engine)
    (buffer,) = engine.module[0].buffers
    assert len(buffer.buckets) > 1 and buffer.numel > buffer.numel_unpadded
    engine.save_checkpoint(str(tmp_path), global_step=1)
    saved, expected = cases.export(engine), [step(engine) for _ in range(2)]
    for settings in (options, {}):
        resumed = megatron_cases.build(folder, settings)
        resumed.load_checkpoint(str(tmp_path))
        assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.named_weights())
        for metrics in expected:
            assert step(resumed) == pytest.approx(metrics, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_other_values_of_the_forward_are_another_model(folder: Path, tmp_path: Path, kind: str) -> None:
    megatron_cases.build(folder, {}, kind).save_checkpoint(str(tmp_path / "actor"), global_step=1)
    megatron_cases.build(folder, {}, kind).load_checkpoint(str(tmp_path / "actor"))
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    content = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(content | {"rms_norm_eps": 1e-3}))
    with pytest.raises(
        ValueError, match="another model: this run's has rms_norm_eps=0.001, and 1e-06 in the checkpoint"
    ):
        megatron_cases.build(changed, {}, kind).load_checkpoint(str(tmp_path / "actor"))


@pytest.mark.parametrize(("from_checkpoint", "distributed"), [(False, True), (True, False)])
def test_a_resumed_run_has_the_schedule_that_it_names(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, from_checkpoint: bool, distributed: bool
) -> None:
    """What steps is what is reported: the one of its configuration or, where that is asked for, of the checkpoint."""
    settings = {"use_distributed_optimizer": distributed}
    saved = {"lr_decay_style": "linear", "total_training_steps": 10, "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1}
    saved["betas"] = (0.9, 0.95)
    engine = megatron_cases.build(folder, settings, optimizer=saved)
    for _ in range(2):
        step(engine)
        engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path), global_step=2)
    changed = {"total_training_steps": 20, "lr": 1e-4, "min_lr": 1e-5, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    changed["override_optimizer_config"] = {"adam_eps": 1e-5}
    options = {"use_checkpoint_opt_param_scheduler": from_checkpoint}
    resumed: Any = megatron_cases.build(folder, settings, optimizer=saved | changed | options)
    resumed.load_checkpoint(str(tmp_path))
    chosen = saved if from_checkpoint else saved | changed
    told = ["lr=0.0001, and was 0.01", "weight_decay=0.3, and was 0.1", "betas=[0.8,0.9], and was [0.9,0.95]"]
    told += ["override_optimizer_config.adam_eps=1e-05, and was 1e-08", "lr_decay_steps=20, and was 10"]
    for text in (*told, "min_lr=1e-05, and was 0.001"):
        assert f"optim.{text} in the checkpoint" in caplog.text
    for done in (2, 3):
        rate = chosen["lr"] - (chosen["lr"] - chosen["min_lr"]) * done / chosen["total_training_steps"]
        groups = resumed.optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx([rate] * len(groups))
        assert sorted({group["weight_decay"] for group in groups}) == [0.0, chosen["weight_decay"]]
        assert {tuple(group["betas"]) for group in groups} == {chosen["betas"]}
        assert {group["eps"] for group in groups} == {1e-8 if from_checkpoint else 1e-5}
        step(resumed)
        assert resumed.lr_scheduler_step() == pytest.approx(rate)


WARMED: dict[str, Any] = {"lr": 1e-2, "lr_warmup_steps": 4, "lr_warmup_init": 1e-3, "total_training_steps": 8}
STABLE = {"lr_decay_style": "WSD", "lr_wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        {"lr_warmup_steps": 6, "lr_warmup_init": 2e-3},
        STABLE | {"total_training_steps": 20},
    ],
)
def test_a_resume_follows_the_schedule_of_a_run_that_had_it_from_the_start(
    folder: Path, tmp_path: Path, changed: dict[str, Any], keeps: bool
) -> None:
    """And keeps the old one where that is asked for: with the parts that Megatron-Core does not save."""
    first = WARMED | (STABLE | {"lr_wsd_decay_style": "cosine"} if "lr_wsd_decay_steps" in changed else {})
    engine = megatron_cases.build(folder, {}, optimizer=first)
    for _ in range(3):
        engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path), global_step=3)
    options = {"use_checkpoint_opt_param_scheduler": keeps}
    resumed: Any = megatron_cases.build(folder, {}, optimizer=first | changed | options)
    resumed.load_checkpoint(str(tmp_path))
    whole: Any = megatron_cases.build(folder, {}, optimizer=first | ({} if keeps else changed))
    for _ in range(3):
        whole.lr_scheduler_step()
    for _ in range(5):
        pairs = zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True)
        assert all([one[key] == other[key] for key in ("lr", "weight_decay")] == [True] * 2 for one, other in pairs)
        assert resumed.lr_scheduler_step() == whole.lr_scheduler_step()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0]),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 16}, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ({"lr_warmup_steps": 2, "lr_warmup_init": 0.5}, [0.5, 0.75, 1.0]),
        ({"lr_decay_style": "cosine", "total_training_steps": 2, "min_lr": 0.2}, [1.0, 0.6, 0.2, 0.2]),
        ({"lr_decay_style": "linear", "lr_decay_steps": 4, "total_training_steps": 9}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 2, "lr_wsd_decay_style": "linear", "total_training_steps": 4},
         [1.0, 1.0, 1.0, 0.5, 0.0]),
    ],
)  # fmt: skip
def test_schedules(changes: dict[str, Any], expected: list[float]) -> None:
    rates = []
    schedule, group = scheduler(**changes)
    for _ in expected:
        rates.append(group["lr"])
        schedule.step(1)
    assert rates == pytest.approx(expected)


def scheduler(**changes: Any) -> tuple[Any, dict[str, Any]]:
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    optimizer.param_groups[0]["wd_mult"] = 0.5
    config = McoreOptimizerConfig(**({"lr": 1.0} | changes))
    return get_megatron_optimizer_param_scheduler(optimizer, config), optimizer.param_groups[0]


def test_weight_decay_follows_its_group_and_style() -> None:
    schedule, group = scheduler(weight_decay=0.4, weight_decay_incr_style="linear", total_training_steps=4)
    decays = []
    for _ in range(6):
        decays.append(group["weight_decay"])
        schedule.step(1)
    assert decays == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_decay_style": "cosine"}, "lr_decay_style=cosine needs optim.total_training_steps"),
        ({"lr_warmup_steps_ratio": 0.1}, "total_training_steps"),
        (
            {"lr_decay_style": "linear", "total_training_steps": 2, "lr_warmup_steps": 2},
            "shorter than the schedule of 2",
        ),
        (
            {"lr_decay_style": "WSD", "total_training_steps": 4, "lr_warmup_steps": 1, "lr_wsd_decay_steps": 4},
            "lr_wsd_decay_steps=4 must be at most 3, the number of steps",
        ),
    ],
)
def test_schedules_that_cannot_be_say_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(**changes)
