"""The cases of the engine contract on Megatron-Core: the same batch, losses and references as for FSDP."""

import importlib
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.ranks import note
from tests.workers.engine import cases, real_losses
from verl.workers.config import CheckpointConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import BaseEngine, EngineRegistry

STEPS = 3
SMOOTH = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-3}
"""AdamW of which a step is a smooth function of the gradient, and whose decay shows within three steps."""

LAYERS = {"num_hidden_layers": 4}
TP, PP, CP = ({f"{axis}_parallel_size": 2} for axis in ("tensor_model", "pipeline_model", "context"))
EP = {"expert_model_parallel_size": 2}
OFFLOAD = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), True)
UNEVEN = {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}}
ETP1 = {"expert_tensor_parallel_size": 1}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"override_ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 30000}}
"""In buckets of about a layer."""
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one, offloaded": OFFLOAD, "one, plain optimizer": PLAIN},
    2: {
        "tp 2, sequence parallel": TP,
        "tp 2, plain optimizer, offloaded": TP | PLAIN | OFFLOAD | {"sequence_parallel": False},
        "pp 2": PP,
        "pp 2 x 2 virtual": VPP,
        "pp 2, uneven": PP | UNEVEN,
        "cp 2": CP | PLAIN,
        "dp 2, offloaded": OFFLOAD,
        "dp 2, plain optimizer": PLAIN,
        "dp 2, overlapped, offloaded": OVERLAP | OFFLOAD,
        "ep 2": EP,
        "tp 2 ep 2": TP | EP | ETP1,
        "tp 2, whole experts": TP | ETP1,
        "ep 2, plain optimizer, offloaded": EP | PLAIN | OFFLOAD,
    },
    4: {
        "pp 2 ep 2": PP | EP,
        "tp 2 ep 2 dp 2": TP | EP | ETP1,
        "tp 2 pp 2 ep 2": TP | PP | EP | ETP1,
        "tp 2 cp 2 ep 2": TP | CP | EP | ETP1,
        "cp 2 ep 2": CP | EP,
        "tp 2 ep 2 dp 2, overlapped": TP | EP | ETP1 | OVERLAP,
        "tp 2 pp 2": TP | PP,
        "tp 2 pp 2 x 2 virtual": TP | VPP,
        "tp 2 dp 2": TP,
        "pp 2 dp 2": PP,
        "cp 2 dp 2": CP,
        "tp 2 cp 2": TP | CP,
        "pp 2 cp 2": PP | CP,
        "tp 2 dp 2, whole experts": TP | ETP1 | OVERLAP,
        "dp 4": {},
        "pp 2 x 2 virtual dp 2, overlapped": VPP | OVERLAP,
    },
}

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME = ("one, plain optimizer", "tp 2 pp 2", "tp 2 cp 2", "pp 2 ep 2", "tp 2 ep 2 dp 2")
LONG = {"worlds": (1, 4), "only": SOME}
"""Cases for some layouts of one rank and of four; others that name theirs do so for two."""
CASES: dict[str, dict[str, Any]] = {
    "micro 1": LONG | {"cut": cases.MICRO[1]},
    "dynamic, uneven shards": {"cut": cases.dynamic(20), "uneven": True},
    "recompute": LONG | {"cut": cases.MICRO[3], "engine": {"override_transformer_config": RECOMPUTE}},
    "qwen3": {"cut": cases.MICRO[2], "folder": "qwen3"},
    "tied": {"cut": cases.MICRO[4], "folder": "tied"},
    "value": {"cut": cases.MICRO[3], "kind": "value_model"},
    "qwen3 moe": {"cut": cases.dynamic(20), "folder": "qwen3_moe", "uneven": True},
    "qwen2 moe": LONG | {"cut": cases.MICRO[3], "folder": "qwen2_moe"},
    "deepseek": {
        "cut": cases.MICRO[3],
        "folder": "deepseek",
        "only": ("tp 2, sequence parallel", "tp 2 ep 2", "cp 2"),
    },
    "moonlight": LONG | {"cut": cases.dynamic(20), "folder": "moonlight"},
    "qwen3 moe, first layer dense, biases": {
        "cut": cases.MICRO[3],
        "folder": "qwen3_moe_mixed",
        "only": ("tp 2 ep 2", "pp 2 x 2 virtual", "pp 2, uneven"),
    },
    "llama, rope scaling, all biases": LONG | {"cut": cases.MICRO[3], "folder": "llama"},
    "qwen3, attention bias": {
        "cut": cases.MICRO[4],
        "folder": "qwen3_bias",
        "only": ("tp 2, sequence parallel", "tp 2, plain optimizer, offloaded", "pp 2, uneven"),
    },
    "mixtral": LONG | {"cut": cases.MICRO[3], "folder": "mixtral"},
    "glm4 moe": {
        "cut": cases.MICRO[3],
        "folder": "glm4_moe",
        "only": ("tp 2 ep 2", "tp 2, whole experts"),
    },
    "glm4 moe, air": LONG | {"cut": cases.dynamic(20), "folder": "glm4_moe_air"},
}


WITH_EXPERTS = (
    "qwen3_moe", "qwen2_moe", "mixtral", "deepseek", "moonlight", "qwen3_moe_mixed", "glm4_moe", "glm4_moe_air",
)  # fmt: skip


SHORT = ("pp 2, uneven",)
"""Layouts that only the cases run which name them."""

UNCUT = (
    "one, offloaded", "tp 2, plain optimizer, offloaded", "dp 2, offloaded", "dp 2, plain optimizer",
    "dp 2, overlapped, offloaded",
)  # fmt: skip
"""Layouts that cut a model as another one does, or not at all: whatever the family, they need few cases."""

OF_UNCUT = ("dynamic, uneven shards", "qwen3 moe")

LEFT_TO_FOUR = {
    "pp 2": ("qwen3",),
    "pp 2 x 2 virtual": ("qwen3", "qwen3 moe"),
    "cp 2": ("qwen3", "tied"),
}
"""Layouts of two ranks that cut these cases as they cut others; layouts of four ranks run them."""


def cases_of(world: int, layout: str) -> dict[str, dict[str, Any]]:
    """Return the cases that run on a layout: models with experts where it can cut them, and only them with EP."""
    sizes = LAYOUTS[world][layout]
    cuts_experts = not {"expert_model_parallel_size", "expert_tensor_parallel_size"}.isdisjoint(sizes)
    whole = sizes.get("sequence_parallel", True) or "tensor_model_parallel_size" not in sizes
    found = {}
    for name, case in CASES.items():
        fits = whole if case.get("folder") in WITH_EXPERTS else not cuts_experts
        named = world == 2 or case.get("only", ())[: len(SOME)] == SOME
        left = layout in UNCUT and name not in OF_UNCUT or name in LEFT_TO_FOUR.get(layout, ())
        everywhere = layout not in SHORT and not left
        here = layout in case.get("only", (layout,) if everywhere else ()) or (everywhere and not named)
        if fits and here and world in case.get("worlds", LAYOUTS):
            found[name] = case
    return found


EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 1, "moe_intermediate_size": 48,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
GROUPED = {"n_group": 4, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
QUARTER = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
BIASES = {"attention_bias": True}
MOE = {"num_experts": 4, "moe_intermediate_size": 48}


def write_models(root: Path) -> None:
    cases.write_model(root / "plain", **LAYERS)
    cases.write_model(root / "tied", tie_word_embeddings=True, **LAYERS)
    for name, kind, changes in (
        ("qwen3", "Qwen3", {"head_dim": 24}),
        ("qwen3_moe", "Qwen3Moe", EXPERTS | MOE | {"norm_topk_prob": True}),
        ("qwen2_moe", "Qwen2Moe", MOE | {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}),
        ("mixtral", "Mixtral", EXPERTS | {"num_local_experts": 4}),
        ("deepseek", "DeepseekV3", LATENT | {"q_lora_rank": 32, "rope_parameters": YARN}),
        ("moonlight", "DeepseekV3", LATENT | {"q_lora_rank": None, "n_group": 1}),
        ("glm4_moe", "Glm4Moe", cases.SIGMOID | GROUPED | {"use_qk_norm": True, "rope_parameters": QUARTER}),
        ("glm4_moe_air", "Glm4Moe", cases.SIGMOID),
        ("qwen3_moe_mixed", "Qwen3Moe", EXPERTS | MOE | BIASES | {"norm_topk_prob": False, "mlp_only_layers": [0]}),
        ("llama", "Llama", BIASES | {"mlp_bias": True, "rope_parameters": LLAMA3}),
        ("qwen3_bias", "Qwen3", BIASES | {"head_dim": 24}),
    ):
        cases.write_family(root / name, kind, changes, **LAYERS)


def runs_of(layout: str) -> list[str]:
    """Return what else runs on a layout."""
    return ["three steps"] if layout in SHORT else ["continued", "three steps"]


def model_of(world: int, layout: str) -> str:
    """Return the model of these runs."""
    return "qwen3_moe" if "expert_model_parallel_size" in LAYOUTS[world][layout] else "plain"


def build(
    folder: Path,
    engine: dict[str, Any],
    kind: str = "language_model",
    optimizer: dict[str, Any] | None = None,
    model: Any = None,
) -> BaseEngine:
    built = EngineRegistry.new(
        kind,
        "megatron",
        model_config=model or cases.model_config(folder),
        engine_config=McoreEngineConfig(**engine),
        optimizer_config=McoreOptimizerConfig(
            **({"lr": cases.LR, "weight_decay": 0.01, "clip_grad": 1.0} | (optimizer or {}))
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=["model", "optimizer", "extra"]
        ),
    )
    built.initialize()
    return built


def gradients(engine: Any) -> dict[str, Tensor]:
    """Map the gradient of every parameter back to checkpoint names; collective."""
    from verl.models.mcore.gpt.export import exported_weights

    whole = whole_gradients(engine)
    stream = exported_weights(engine.models, engine.hf_config, engine.is_value_model, of=whole.get)
    return {name: tensor.clone() for name, tensor in stream}


def whole_gradients(engine: Any) -> dict[Tensor, Tensor]:
    """Return the gradient of each parameter of this rank, over all data-parallel ranks; collective."""
    if engine.engine_config.use_distributed_optimizer:
        return from_shards(engine.optimizer)
    parameters = chain.from_iterable(model.parameters() for model in engine.models)
    return {parameter: parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")}


def from_shards(optimizer: Any) -> dict[Tensor, Tensor]:
    """Put together what distributed optimizers step with, of which each rank has its shards; collective."""
    import torch.distributed as dist

    optimizer.prepare_grads()
    whole = {}
    for each in optimizer.chained_optimizers:  # one of them has the experts, over the ranks that share those
        models = chain(*each.model_float16_groups, *each.model_fp32_groups)
        pairs = zip(models, chain(*each.shard_fp32_from_float16_groups, *each.shard_fp32_groups), strict=True)
        owned = {parameter: shard.grad for parameter, shard in pairs}
        for buffer in each.buffers:
            values, owners = torch.zeros(2, buffer.grad_data.numel())
            for parameter in buffer.param_index_map:
                if parameter in owned:
                    place = each._get_model_param_range_map(parameter)["gbuf_world"]
                    values[place.start : place.end] = owned[parameter]
                    owners[place.start : place.end] = 1
            for tensor in (values, owners):
                dist.all_reduce(tensor, group=each.data_parallel_group)
            for parameter, (start, end, _) in buffer.param_index_map.items():
                assert (owners[start:end] == 1).all(), "each element has one owner"
                whole[parameter] = values[start:end].view(parameter.shape)
    return whole


def real_loss(engine: Any, kind: str, rows: list[int], cut: dict[str, Any]) -> dict[str, Any]:
    """Return metrics, norm and whole gradient of the loss of a role."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(real_losses.batch(rows, **cut), real_losses.LOSSES[kind])
        engine.optimizer.prepare_grads()
        found = gradients(engine)
        norm = float(engine.optimizer.get_grad_norm())
    return {"metrics": metrics, "gradients": found, "norm": norm}


def run_case(folder: Path, layout: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Infer, differentiate the loss of the role, take one step, and export the weights before and after."""
    kind, path = case.get("kind", "language_model"), folder / case.get("folder", "plain")
    engine = build(path, layout | case.get("engine", {}), kind, model=cases.model_config(path, **case.get("model", {})))
    rows = cases.rows_of(engine, case.get("uneven", False))
    result: dict[str, Any] = {"rows": rows, "before": cases.export(engine)}
    with engine.eval_mode():
        result["output"] = engine.infer_batch(cases.batch(rows, **case["cut"]))
    result["real loss"] = real_loss(engine, kind, rows, case["cut"])
    with engine.train_mode():
        result["metrics"] = engine.train_batch(cases.batch(rows, **case["cut"]), cases.loss_fn)
        result["lr"] = engine.lr_scheduler_step()
    result["weights"] = cases.export(engine)
    cases.check_sent(engine, result["weights"])
    result["version"] = engine.weights_version
    return result


def three_steps(
    folder: Path, layout: dict[str, Any], name: str = "plain", model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Take steps that a decay of norms and biases, or a lost moment, would show."""
    overrides = {"adam_eps": SMOOTH["eps"]}
    engine = build(
        folder / name,
        layout,
        optimizer={key: SMOOTH[key] for key in ("lr", "weight_decay", "betas")}
        | {"override_optimizer_config": overrides},
        model=cases.model_config(folder / name, **(model or {})),
    )
    rows = cases.rows_of(engine, False)
    with engine.train_mode():
        metrics = [engine.train_batch(cases.batch(rows, **cases.MICRO[2]), cases.loss_fn) for _ in range(STEPS)]
        weights = cases.export(engine)  # no forward pass has followed the last step
    return {"metrics": metrics, "weights": weights}


ORDER = [(world, name) for world, layouts in LAYOUTS.items() for name in layouts]


def checkpoint_of(folder: Path, world: int, layout: str) -> Path:
    return folder / "checkpoints" / f"{world}, {layout}"


def earlier(world: int, name: str) -> tuple[int, str] | None:
    """Return the layout run last before this one, in the same processes, with the same kind of optimizer."""

    def kind(place: tuple[int, str]) -> tuple[Any, ...]:
        sizes = LAYOUTS[place[0]][place[1]]
        return sizes.get("use_distributed_optimizer", True), "expert_model_parallel_size" in sizes

    before = ORDER[: ORDER.index((world, name))]
    same = [place for place in before if kind(place) == kind((world, name)) and "continued" in runs_of(place[1])]
    return next((place for place in reversed(same) if place[0] == world or max(place[0], world) < 4), None)


def continued(folder: Path, world: int, name: str) -> dict[str, Any]:
    """Save after one step and take another: here, restored into a new engine, and then from another layout."""
    layout, path = LAYOUTS[world][name], checkpoint_of(folder, world, name)
    model = folder / model_of(world, name)

    def step(engine: BaseEngine) -> dict[str, float]:
        rows = cases.rows_of(engine, False)
        with engine.train_mode():
            metrics = engine.train_batch(cases.batch(rows, **cases.MICRO[4]), cases.loss_fn)
        return metrics | {"lr": engine.lr_scheduler_step()}

    schedule = {"lr_decay_style": "linear", "total_training_steps": 4}
    engine, restored = (build(model, layout, optimizer=schedule) for _ in range(2))
    step(engine)
    engine.save_checkpoint(str(path), global_step=1)
    result: dict[str, Any] = {
        "saved": cases.export(engine),
        "expected": step(engine),
    }
    restored.load_checkpoint(str(path))
    result |= {"version": restored.weights_version, "restored": step(restored)}
    result["weights"] = [cases.export(each) for each in (engine, restored)]
    if before := earlier(world, name):
        restored.load_checkpoint(str(checkpoint_of(folder, *before)))
        result["moved"] = step(restored), cases.export(restored)
    return result


def reference_three_steps(folder: Path, name: str = "plain") -> dict[str, Any]:
    """The same by torch: matrices are decayed, norms and biases are not."""
    model = cases.load(folder / name)
    parameters = dict(model.named_parameters())
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **SMOOTH)
    metrics = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, _, values = cases.reference_loss(model)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        metrics.append({name: value.item() for name, value in values.items()} | {"grad_norm": norm.item()})
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    return {"metrics": metrics, "weights": cases.under_checkpoint_names(model, weights)}


def launch_of(world: int, layout: str) -> str:
    """Return which launch runs a layout: those of four ranks that cut experts have their own."""
    return "experts" if world == 4 and "expert_model_parallel_size" in LAYOUTS[world][layout] else "dense"


def run_layouts(rank: int, world_size: int, folder: Path, launch: str) -> None:
    """Run every case of every layout of a launch on one rank and save what came out; rank 0 of 2 runs world 1 too."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if (rank, world_size) == (0, 2):
        run_world(0, 1, folder, launch)
        dist.destroy_process_group()
    store = f"file://{folder}/store_{world_size}_{launch}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    run_world(rank, world_size, folder, launch)


def run_world(rank: int, world_size: int, folder: Path, launch: str) -> None:
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    results: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS[world_size].items():
        if launch_of(world_size, name) != launch:
            continue
        chosen = cases_of(world_size, name)
        parts = {case: partial(run_case, folder, layout, settings) for case, settings in chosen.items()}
        runs = {
            "continued": partial(continued, folder, world_size, name),
            "three steps": partial(three_steps, folder, layout, model_of(world_size, name)),
        }
        parts |= {run: runs[run] for run in runs_of(name)}
        results[name] = {}
        for case, run in parts.items():
            note(f"{name}, {case}")
            results[name][case] = run()
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"world_{world_size}_{launch}_rank_{rank}.pt")
