"""``trainer.device=npu``: what the launching machine needs, and what does not run there, said before Ray starts."""

import importlib.util

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.errors import WrongInput
from verl.trainer.config.rules.no_effect import idle_keys
from verl.trainer.config.run_config import RunConfig
from verl.trainer.config.validation import validate_config
from verl.trainer.main_generation import prepare
from verl.trainer.preflight import check_run_machine
from verl.trainer.run import inputs
from verl.utils.process.owner import Ownership

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def base(composed):
    return composed("trainer.device=npu")


def changed(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def violations(config):
    try:
        validate_config(config, use_reference_policy=False, use_critic=False)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


@pytest.fixture
def machine(monkeypatch):
    """Say which packages and device files this machine has."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # a cluster of other tests may run in this process
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    find, glob = importlib.util.find_spec, inputs.glob.glob

    def have(*packages, devices=0):
        known = {name: object() if name in packages else None for name in ("torch_npu", "vllm_ascend")}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: known[name] if name in known else find(name))
        files = [f"/dev/davinci{number}" for number in range(devices)]
        monkeypatch.setattr(inputs.glob, "glob", lambda path: files if "davinci" in path else glob(path))

    return have


def test_it_is_checked_like_any_other_device(base, machine):
    machine("torch_npu")
    profiled = {"global_profiler.tool": "npu", "global_profiler.steps": [1]}
    role = "actor_rollout_ref.actor.profiler"
    profiled |= {f"{role}.enable": True, f"{role}.ranks": [0], f"{role}.tool_config.npu.discrete": True}
    assert violations(changed(base, profiled)) == {}
    config = changed(base, {f"{ROLLOUT}.layered_summon": True})
    (idle,) = idle_keys(RunConfig.parse(config), OmegaConf.to_container(config, resolve=True))
    assert (idle.key, idle.others) == (f"{ROLLOUT}.layered_summon", ("trainer.device",))


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (
            {f"{MODEL}.use_fused_kernels": True, f"{MODEL}.fused_kernel_options.impl_backend": "triton"},
            f"{MODEL}.fused_kernel_options.impl_backend",
            "needs CUDA: write torch with trainer.device=npu",
        ),
        (
            {f"{MODEL}.use_prefix_sharing": True, f"{MODEL}.use_remove_padding": True},
            f"{MODEL}.use_prefix_sharing",
            "has no attention for trainer.device=npu: write false",
        ),
        ({"global_profiler.tool": "torch_memory"}, "global_profiler.tool", "not npu, or profile with npu"),
    ],
)
def test_what_is_refused(base, changes, key, message):
    assert message in violations(changed(base, changes))[key]


def test_megatron_core_is_refused(composed):
    config = composed("trainer.device=npu", "reward_model.enable=true", name="ppo_megatron_trainer")
    found = violations(config)
    text = "is not supported with trainer.device=npu: Megatron-Core runs on CUDA and CPU. Write --config-name=ppo_train"
    for role in ("actor_rollout_ref.actor", "reward_model"):
        assert f"{role}.strategy=megatron: {text}" in found[f"{role}.strategy"]


def test_what_this_machine_lacks(base, machine):
    machine()
    with pytest.raises(WrongInput, match="^trainer.device=npu: needs the package torch_npu, which is not installed"):
        check_run_machine(RunConfig.parse(base))
    machine("torch_npu")
    with pytest.raises(WrongInput, match=r"has no Ascend device, no /dev/davinci\[0-9\]\*: write cpu, or name a clu"):
        check_run_machine(RunConfig.parse(base))
    machine("torch_npu", devices=2)
    with pytest.raises(WrongInput, match=f"^{ROLLOUT}.name=vllm: with trainer.device=npu needs the package vllm_asce"):
        check_run_machine(RunConfig.parse(base))
    check_run_machine(RunConfig.parse(changed(base, {f"{ROLLOUT}.name": "hf"})))
    judge = {"reward_model.enable": True, "reward_model.model_type": "generative", "reward_model.name": "vllm"}
    with pytest.raises(WrongInput, match=r"^reward_model\.name=vllm"):
        check_run_machine(RunConfig.parse(changed(base, judge | {f"{ROLLOUT}.name": "hf"})))
    machine("torch_npu", "vllm_ascend", devices=2)
    check_run_machine(RunConfig.parse(changed(base, judge)))
    machine("torch_npu", "vllm_ascend")
    check_run_machine(
        RunConfig.parse(changed(base, {"ray_kwargs.ray_init.resources.NPU": 2}))
    )  # Ray is told what it cannot count
    machine()
    check_run_machine(
        RunConfig.parse(changed(base, {"ray_kwargs.ray_init.address": "10.0.0.1:6379"}))
    )  # another machine may have it all


def test_generation_asks_for_the_same(composed, small_run, machine):
    model = next(word for word in small_run if word.startswith("actor_rollout_ref.model.path=")).partition("=")[2]
    rows = next(word for word in small_run if word.startswith("data.train_files=")).partition("=")[2]
    overrides = ["trainer.device=npu", f"model.path={model}", f"data.path={rows}", f"data.output_path={model}/out"]
    config = composed(*overrides, "trainer.n_gpus_per_node=1", name="generation", base=False)
    config.rollout.tensor_model_parallel_size = 1
    machine()
    with pytest.raises(WrongInput, match="needs the package torch_npu"):
        prepare(config, Ownership())
    machine("torch_npu", devices=1)
    with pytest.raises(WrongInput, match=r"^rollout\.name=vllm: .*needs the package vllm_ascend"):
        prepare(config, Ownership())
