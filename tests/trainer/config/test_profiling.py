"""What of profiling is refused before Ray starts, and what is not."""

import re

import pytest
from omegaconf import OmegaConf

from verl.base_config import ConfigError
from verl.trainer.config.rules import profiler
from verl.trainer.config.rules.profiler import missing_part
from verl.trainer.config.validation import validate_config

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout"))
OPTIONS, OF_RUN = f"{ACTOR}.tool_config", "global_profiler.global_tool_config"
TORCH = {"global_profiler.tool": "torch", "global_profiler.steps": [1, 2], f"{ACTOR}.enable": True}


@pytest.fixture(scope="module")
def base(composed):
    return composed()


def violations(base, changes):
    config = base.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    try:
        validate_config(config, use_reference_policy=True, use_critic=True)
    except ConfigError as error:
        return {violation.key: str(violation) for violation in error.violations}
    return {}


@pytest.mark.parametrize(
    "changes",
    [
        TORCH,
        TORCH | {f"{ACTOR}.ranks": [0, 1], "critic.profiler.enable": True, "critic.profiler.all_ranks": True},
        TORCH | {"global_profiler.tool": None, f"{ACTOR}.tool": "torch", f"{ROLLOUT}.enable": False},
        TORCH | {"trainer.total_training_steps": 2, "global_profiler.profile_continuous_steps": True},
        {"global_profiler.tool": "torch"},  # with nothing that asks for it
        TORCH | {f"{ACTOR}.tool_config.torch.step_start": 1, "actor_rollout_ref.actor.ppo_epochs": 2},
        {f"{ACTOR}": None, "critic.profiler": None, "reward_model.profiler": None, "global_profiler.tool": "torch"},
        TORCH | {f"{REF}": None, f"{ROLLOUT}": None, "global_profiler.save_path": None},
    ],
)  # fmt: skip
def test_accepted(base, changes):
    assert violations(base, changes) == {}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (TORCH | {"global_profiler.tool": "perf"}, "global_profiler.tool", "must be null or one of nsys, npu, torch"),
        (TORCH | {"global_profiler.steps": [0]}, "global_profiler.steps", "each 1 or more"),
        (TORCH | {"global_profiler.steps": 3}, "global_profiler.steps", "must be a list"),
        (TORCH | {"global_profiler.steps": None}, "global_profiler.steps", f"{ACTOR}.enable=true: write a list"),
        (TORCH | {f"{ACTOR}.enable": False}, "global_profiler.steps", "no role of this run is profiled"),
        (TORCH | {"trainer.total_training_steps": 1}, "global_profiler.steps", "steps [2] are after the last step"),
        (TORCH | {"global_profiler.tool": None}, f"{ACTOR}.enable", "needs a tool"),
        (TORCH | {f"{ACTOR}.ranks": [0, 2]}, f"{ACTOR}.ranks", "ranks [2] do not exist, actor_rollout_ref.actor has 2"),
        (TORCH | {f"{ACTOR}.ranks": [-1]}, f"{ACTOR}.ranks", "0 or more"),
        (TORCH | {f"{REF}.enable": True, f"{REF}.ranks": [5]}, f"{REF}.ranks", "has 2 workers"),
        (TORCH | {f"{OPTIONS}.torch.step_start": 1}, f"{OPTIONS}.torch.step_start", "has 1, counted"),
        (
            TORCH | {f"{ACTOR}.tool_config.torch.step_end": 0},
            f"{ACTOR}.tool_config.torch.step_end",
            "above step_start=0",
        ),
        (TORCH | {"critic.profiler.enable": True, "critic.profiler.tool": "nsys"}, "critic.profiler.tool", "tool=nsys"),
        (TORCH | {"global_profiler.tool": "nsys"}, f"{ACTOR}.ranks", "names no rank to profile by nsys"),
        (TORCH | {"global_profiler.tool": "nsys", f"{ACTOR}.all_ranks": True}, "global_profiler.tool", "device=cuda"),
        ({"global_profiler.tool": "torch_memory"}, "global_profiler.tool", "records the allocator of CUDA and needs"),
        (
            TORCH | {"global_profiler.tool": "npu", f"{ACTOR}.ranks": [0]},
            "global_profiler.tool",
            "profiles Ascend devices",
        ),
        *(
            (TORCH | {f"global_profiler.{key}": value}, f"global_profiler.{key}", f"write {ACTOR}.{key}")
            for key, value in (("enable", True), ("all_ranks", True), ("ranks", [1]))
        ),
        *(
            (TORCH | {f"critic.profiler.{key}": value}, f"critic.profiler.{key}", f"write global_profiler.{key}")
            for key, value in (("steps", [1]), ("profile_continuous_steps", True), ("global_tool_config", {}))
        ),
        (TORCH | {f"{OPTIONS}.torch.wait": 1}, f"{OPTIONS}.torch.wait", "needs active, the mini-batches"),
        (
            TORCH | {f"{OPTIONS}.torch.active": 1, f"{OPTIONS}.torch.step_end": 2},
            f"{OPTIONS}.torch.step_end",
            "cannot be combined with active=1",
        ),
        (
            TORCH | {f"{OPTIONS}.torch.active": 1, f"{OPTIONS}.torch.warmup": 1},
            f"{OPTIONS}.torch.skip_first",
            "plus wait=0 and warmup=1 is after the last mini-batch",
        ),
        (TORCH | {f"{OPTIONS}.torch.contents": ["gpu"]}, f"{OPTIONS}.torch.contents", "must be a subset of [cpu,cuda"),
        *(
            (TORCH | {f"global_profiler.{key}": value}, f"global_profiler.{key}", message)
            for key, value, message in (
                ("finish_hook_ranks", [0], "needs finish_hook_cmd"),
                ("finish_hook_all_ranks", True, "needs finish_hook_cmd"),
                ("finish_hook_ranks", [-1], "each 0 or more"),
            )
        ),
        (
            TORCH | {"global_profiler.finish_hook_cmd": "ls", "global_profiler.finish_hook_ranks": [2]},
            "global_profiler.finish_hook_ranks",
            "ranks [2] do not exist",
        ),
        (
            {"global_profiler.finish_hook_cmd": "ls"},
            "global_profiler.finish_hook_cmd",
            "follows the last profiled step, and there is none",
        ),
        (TORCH | {"critic.profiler.finish_hook_cmd": "ls"}, "critic.profiler.finish_hook_cmd", "is set for the run"),
        (TORCH | {f"{OPTIONS}.torhc.step_start": 1}, f"{OPTIONS}.torhc", "there is no such tool: nsys, npu, torch"),
        (TORCH | {f"{OPTIONS}.torch": 3}, f"{OPTIONS}.torch", "must be a mapping"),
        (TORCH | {OPTIONS: 3}, OPTIONS, "must be null or a mapping of nsys, npu, torch, torch_memory"),
        (TORCH | {f"{OF_RUN}.torch.step_start": 1}, f"{OF_RUN}.torch", f"write {OPTIONS}.torch"),
        (
            {"global_profiler.tool": "nsys", f"{OF_RUN}.nsys.worker_nsight_options": None},
            f"{OF_RUN}.nsys.worker_nsight_options",
            "of options of nsys",
        ),
        ({"global_profiler": None}, "global_profiler", "must be a mapping"),
        (TORCH | {"global_profiler.save_path": f"{__file__}/x"}, "global_profiler.save_path", f"{__file__} is a file"),
        (
            TORCH | {"critic.profiler.enable": True, "critic.profiler.save_path": __file__},
            "critic.profiler.save_path",
            "is a file",
        ),
        (TORCH | {f"{ACTOR}.save_path": "hdfs://host/x"}, f"{ACTOR}.save_path", "must be a folder"),
        (TORCH | {f"{ACTOR}.tool_config.npu.level": "9"}, f"{ACTOR}.tool_config.npu.level", "level_none"),
        (TORCH | {f"{ACTOR}.tool_config.torch_memory.stacks": "x"}, f"{ACTOR}.tool_config.torch_memory.stacks", "cpp"),
    ],
)
def test_refused(base, changes, key, message):
    found = violations(base, changes)
    assert key in found and message in found[key], found


def test_parts_that_are_missing(monkeypatch):
    monkeypatch.setattr(profiler.importlib.util, "find_spec", lambda name: None)
    assert re.match("needs the package nvtx", missing_part("nsys", "cuda", True))
    assert re.match("needs the package torch_npu", missing_part("npu", "npu", True))
    monkeypatch.setattr(profiler.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(profiler.shutil, "which", lambda name: None)
    assert re.match("needs the program nsys", missing_part("nsys", "cuda", True))
    assert missing_part("torch_memory", "npu", True).endswith("needs trainer.device=cuda, not npu, or profile with npu")
    assert missing_part("nsys", "cuda", False) is None  # another machine may have it
    for tool, device in (("torch", "cpu"), ("torch", "cuda"), ("torch_memory", "cuda"), ("npu", "npu")):
        assert missing_part(tool, device, True) is None


def test_rollout_and_reward_model_follow_the_actor_but_for_their_own_options(composed):
    nodes = {ROLLOUT: 3, "reward_model.profiler": 4, ACTOR: 2}
    overrides = [f"{node}.tool_config.torch.wait={wait}" for node, wait in nodes.items()]
    config = composed(f"{ACTOR}.tool_config.torch.active=5", *overrides)
    for node, wait in nodes.items():
        options = OmegaConf.select(config, f"{node}.tool_config.torch")
        assert (options.active, options.wait, options.skip_first) == (5, wait, 0)


def test_roles_follow_the_run(composed):
    """What is set once for the run reaches the node of each role."""
    folder = "global_profiler.save_path=/traces"
    memory = "global_profiler.global_tool_config.torch_memory"
    options = [f"{memory}.context=alloc", f"+{memory}.kw_args.a=1"]
    options += ["global_profiler.global_tool_config.nsys.discrete=true", f"{ACTOR}.enable=true", f"{ACTOR}.ranks=[1]"]
    config = composed("global_profiler.tool=torch", folder, *options)
    for key in (ACTOR, REF, ROLLOUT, "critic.profiler", "reward_model.profiler"):
        node = OmegaConf.select(config, key)
        assert (node.tool, node.save_path) == ("torch", "/traces")
        assert node.tool_config.nsys.discrete is True
        assert node.tool_config.torch_memory.context == "alloc"
        assert dict(node.tool_config.torch_memory.kw_args) == {"a": 1}
    rollout = config.actor_rollout_ref.rollout.profiler
    assert rollout.enable is True and list(rollout.ranks) == [1]
    assert config.critic.profiler.enable is False
