"""What each dataclass refuses, and what it makes of keys that stand twice."""

from dataclasses import fields

import pytest

from verl.algos.config import AlgoConfig, KLControlConfig
from verl.base_config import BaseConfig, _node_class, type_hints
from verl.trainer.config import run_config, sft  # noqa: F401 (nodes of the trainers)
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.config import NPUToolConfig, TorchMemoryToolConfig, TorchProfilerToolConfig
from verl.workers.config import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPCriticModelCfg,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    RolloutConfig,
    SamplingConfig,
)
from verl.workers.config.model import Loaded

ACTOR = {"ppo_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (FSDPOptimizerConfig, {"lr": -1.0}, "lr=-1.0"),
        (FSDPOptimizerConfig, {"lr_warmup_steps_ratio": 1.5}, "lr_warmup_steps_ratio=1.5"),
        (FSDPOptimizerConfig, {"betas": [0.9, 1.0]}, r"betas=\[0.9,1.0\]"),
        (FSDPOptimizerConfig, {"betas": [0.9]}, "two numbers"),
        (FSDPOptimizerConfig, {"clip_grad": 0.0}, "clip_grad=0.0"),
        (FSDPOptimizerConfig, {"lr_scheduler_type": "linear"}, "one of constant, cosine"),
        (FSDPOptimizerConfig, {"warmup_style": "linear"}, "write lr_scheduler_type"),
        (FSDPEngineConfig, {"strategy": "zero"}, "one of fsdp, fsdp2"),
        (FSDPEngineConfig, {"fsdp_size": 0}, "fsdp_size=0"),
        (FSDPEngineConfig, {"model_dtype": "int8"}, "model_dtype=int8"),
        (FSDPEngineConfig, {"wrap_policy": {"min_params": 1}}, "wrap_policy.min_params=1: unknown key"),
        (FSDPEngineConfig, {"mixed_precision": {"param_dtype": "bf17"}}, "mixed_precision.param_dtype=bf17"),
        (McoreEngineConfig, {"strategy": "fsdp"}, "must be megatron"),
        (McoreEngineConfig, {"context_parallel_size": 0}, "context_parallel_size=0: must be an integer of 1 or more"),
        (McoreEngineConfig, {"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size of 2 or more"),
        (
            McoreEngineConfig,
            {"expert_tensor_parallel_size": 0},
            "expert_tensor_parallel_size=0: must be an integer of 1 or more",
        ),
        (McoreEngineConfig, {"dtype": "fp16"}, "null or one of fp32"),
        (
            McoreEngineConfig,
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "override_transformer_config": {"batch_p2p_comm": True},
            },
            "batch_p2p_comm=true: must be false with virtual stages",
        ),
        (McoreOptimizerConfig, {"optimizer": "sgd"}, "write adam"),
        (McoreOptimizerConfig, {"lr_decay_style": "step"}, "one of constant, linear, cosine"),
        (McoreOptimizerConfig, {"lr": 1e-6, "min_lr": 1e-5}, "min_lr=1e-05: must be from 0 to lr"),
        (McoreOptimizerConfig, {"lr_decay_style": "WSD"}, "must be given with lr_decay_style=WSD"),
        (CheckpointConfig, {"save_contents": ["model", "weights"]}, "unknown parts weights"),
        (FSDPActorConfig, {**ACTOR, "checkpoint": CheckpointConfig(async_save=True)}, "checkpoint.async_save=true"),
        (ActorConfig, ACTOR, r"strategy=\?\?\?"),
        (FSDPActorConfig, {}, "set ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=true"),
        (FSDPActorConfig, {**ACTOR, "ppo_micro_batch_size": 4}, "excludes ppo_micro_batch_size_per_gpu"),
        (FSDPActorConfig, {**ACTOR, "loss_agg_mode": "mean"}, "seq-mean-token-sum-norm"),
        (FSDPActorConfig, {**ACTOR, "kl_loss_type": "k4"}, "kl_loss_type=k4"),
        (FSDPActorConfig, {**ACTOR, "clip_ratio_c": 1.0}, "clip_ratio_c=1.0"),
        (FSDPActorConfig, {**ACTOR, "strategy": "megatron"}, "one of fsdp, fsdp2"),
        (CriticConfig, {"strategy": "fsdp"}, "use_dynamic_bsz"),
        (FSDPCriticConfig, {**ACTOR, "ulysses_sequence_parallel_size": 2}, "critic.model.use_remove_padding=true"),
        (FSDPCriticConfig, {**ACTOR, "cliprange_value": 0.0}, "cliprange_value=0.0"),
        (RolloutConfig, {}, r"name=\?\?\?"),
        (RolloutConfig, {"name": "vlm"}, "one of vllm, sglang, hf"),
        (RolloutConfig, {"name": "vllm", "top_p": 0.0}, "top_p=0.0"),
        (RolloutConfig, {"name": "vllm", "expert_parallel_size": 3}, "data_parallel_size = 2"),
        (RolloutConfig, {"name": "vllm", "pipeline_model_parallel_size": 2}, "not supported by vllm"),
        (RolloutConfig, {"name": "vllm", "gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        (SamplingConfig, {"do_sample": True}, "temperature=0: must be above 0 with do_sample=true"),
        (HFModelConfig, {"lora_rank": -1}, "lora_rank=-1"),
        (HFModelConfig, {"fused_kernel_options": {"impl_backend": "cuda"}}, "torch or triton"),
        (AlgoConfig, {"gamma": 1.5}, "gamma=1.5"),
        (AlgoConfig, {"kl_penalty": "k9"}, "kl_penalty=k9"),
        (AlgoConfig, {"rollout_is_level": "word"}, "token, sequence, geometric"),
        (KLControlConfig, {"horizon": 0}, "horizon=0"),
        (KLControlConfig, {"type": "pid"}, "one of fixed, adaptive"),
        (ProfilerConfig, {"ranks": 3}, "ranks=3: must be a list"),
        (ProfilerConfig, {"tool": "perf"}, "tool=perf"),
        (NPUToolConfig, {"contents": ["gpu"]}, r"contents=\[gpu\]"),
        (NPUToolConfig, {"level": "level9"}, "level=level9"),
        (TorchMemoryToolConfig, {"stack_depth": 0}, "stack_depth=0"),
        (TorchProfilerToolConfig, {"step_start": 2, "step_end": 2}, "step_end=2"),
    ],
)
def test_refused(cls, values, message):
    with pytest.raises(ValueError, match=message):
        cls(**values)


def test_established_error_types():
    with pytest.raises(NotImplementedError):
        RolloutConfig(name="sglang", pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError):
        FSDPActorConfig()


@pytest.mark.parametrize(
    ("values", "n_gpus", "train", "message"),
    [
        (ACTOR | {"ppo_mini_batch_size": 64}, 8, 32, "at most data.train_batch_size=32"),
        ({"ppo_micro_batch_size": 3, "ppo_mini_batch_size": 8}, 2, 8, "must divide ppo_mini_batch_size=8"),
        ({"ppo_micro_batch_size": 4, "ppo_mini_batch_size": 8}, 8, 8, "at least the 8 workers"),
        (ACTOR | {"ppo_mini_batch_size": 8, "ulysses_sequence_parallel_size": 2}, 2, 8, "use_remove_padding=true"),
    ],
)
def test_actor_against_the_workers(values, n_gpus, train, message):
    with pytest.raises(ValueError, match=message):
        FSDPActorConfig(**values).validate(n_gpus, train, {})


def test_ulysses_covers_a_small_global_micro_batch():
    values = {"ppo_micro_batch_size": 4, "ppo_mini_batch_size": 8, "ulysses_sequence_parallel_size": 2}
    FSDPActorConfig(**values).validate(8, 8, {"use_remove_padding": True})
    with pytest.raises(ValueError, match="critic|at least the 16 workers"):
        FSDPCriticConfig(**(values | {"model": FSDPCriticModelCfg(use_remove_padding=True)})).validate(16, 8)


@pytest.mark.parametrize(("role", "inner", "counts"), [(1.0, 0.5, 0.5), (0.3, 1.0, 0.3), (1.0, 1.0, 1.0)])
def test_the_changed_gradient_limit_counts(role, inner, counts):
    optim = FSDPOptimizerConfig(lr=2e-6, clip_grad=inner)
    for config in (
        FSDPActorConfig(**ACTOR, optim=optim, grad_clip=role),
        FSDPCriticConfig(**ACTOR, optim=optim, grad_clip=role),
    ):
        merged = config.optimizer()
        assert (merged.clip_grad, merged.lr) == (counts, 2e-6)


def test_deprecated_spellings_are_carried_over():
    with pytest.warns(DeprecationWarning, match="lr_scheduler_type"):
        assert FSDPOptimizerConfig(warmup_style="cosine").lr_scheduler_type == "cosine"
    with pytest.warns(DeprecationWarning, match="clip_grad"):
        assert FSDPOptimizerConfig(grad_clip=0.2).clip_grad == 0.2


def test_the_engine_of_a_role_is_its_sharding_node():
    engine = FSDPEngineConfig(param_offload=True)
    assert FSDPActorConfig(**ACTOR, fsdp_config=engine).engine is engine
    critic = FSDPCriticConfig(**ACTOR, model=FSDPCriticModelCfg(path="p", lora_rank=4, fsdp_config=engine))
    assert critic.engine is engine and critic.model_config is critic.model
    model = critic.model.as_model_config()
    assert (model.path, model.lora_rank, model.tokenizer_path) == ("p", 4, "p")


def test_profilers_combine():
    one = ProfilerConfig(tool="nsys", enable=True, ranks=[0, 1], save_path="a")
    two = ProfilerConfig(tool="nsys", all_ranks=True, ranks=[1, 2])
    both, common = one.union(two), one.intersect(two)
    assert (both.enable, both.all_ranks, both.ranks, both.save_path) == (True, True, [0, 1, 2], "a")
    assert (common.enable, common.all_ranks, common.ranks) == (False, False, [1])
    with pytest.raises(AssertionError, match="nsys and torch"):
        one.union(ProfilerConfig(tool="torch"))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ({}, 0.2, 0.2),
        ({"clip_ratio": 0.1}, 0.1, 0.1),
        ({"clip_ratio": 0.1, "clip_ratio_high": 0.3}, 0.1, 0.3),
        ({"clip_ratio": 0.3, "clip_ratio_low": 0.2}, 0.3, 0.3),
        ({"clip_ratio_high": 0.3}, 0.2, 0.3),
    ],
)
def test_a_symmetric_clip_range_is_given_by_clip_ratio_alone(values, low, high):
    """A side of 0.2, its default, follows ``clip_ratio``, as actor.yaml and docs/configuration.md say."""
    config = FSDPActorConfig(**ACTOR, **values)
    assert (config.clip_ratio_low, config.clip_ratio_high) == (low, high)


def subclasses(cls: type) -> list[type]:
    return [each for child in cls.__subclasses__() for each in (child, *subclasses(child))]


def test_every_key_has_a_line_of_prose():
    """A key that holds a node is described by the docstring of its dataclass; what a node loads is no key."""
    bare = []
    for cls in subclasses(BaseConfig):
        if cls.__module__.startswith("verl."):
            loaded = {name for name, value in vars(cls).items() if isinstance(value, Loaded)}
            keys = [each for each in fields(cls) if each.name != "_target_" and each.name not in loaded]
            is_node = {each.name: _node_class(type_hints(cls)[each.name]) is not None for each in keys}
            bare += [f"{cls.__name__}.{each.name}" for each in keys if not is_node[each.name] and not each.metadata]
    assert bare == []
