"""Runs with ``trainer.device=npu`` on a fake torch_npu give the same numbers as runs on the CPU.

The fake device has separate memory, the kernels of the CPU, and gloo with the limits of HCCL for HCCL. Mixing its
tensors with CPU tensors fails, as does any use of CUDA.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes import torch_npu_device

from .conftest import REPOSITORY, Run, Workspace

ACTOR, MODEL, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.model", "critic"
FP32 = "{param_dtype: fp32, reduce_dtype: fp32}"  # other devices than the CPU compute in bf16 unless told
TWO_STEPS, THREE_STEPS = 2, 3
NPUS = {
    "trainer.device": "npu",
    "+ray_kwargs.ray_init.resources.NPU": 2,
    "ray_kwargs.ray_init.num_cpus": 4,
}
PROFILED = {
    "global_profiler.tool": "npu",
    "global_profiler.steps": "[1,3]",
    f"{ACTOR}.profiler.enable": True,
    f"{ACTOR}.profiler.ranks": "[1]",
    f"{CRITIC}.profiler.enable": True,
    f"{CRITIC}.profiler.ranks": "[0]",
    f"{CRITIC}.profiler.tool_config.npu.discrete": True,
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch_npu_device.COMPILER is None, reason="a C++ compiler builds the device"),
]


@pytest.fixture(scope="module")
def on_npu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which there are two devices."""
    library = tmp_path_factory.mktemp("device") / "npu_device.so"
    torch_npu_device.build(library)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "fakes")])
    return {"PYTHONPATH": path, "TORCH_NPU_DEVICE": str(library)}


def everything(workspace: Workspace) -> dict[str, Any]:
    """Return a PPO run with four roles, packed rows, Ulysses, a fused head and every kind of offload."""
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.rollout.name": "hf",
        f"{MODEL}.use_fused_kernels": True,
        f"{MODEL}.enable_activation_offload": True,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        f"{ACTOR}.fsdp_config.param_offload": True,
        f"{ACTOR}.fsdp_config.optimizer_offload": True,
        f"+{ACTOR}.fsdp_config.mixed_precision": FP32,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision": FP32,
        f"{CRITIC}.model.path": workspace.model,
        f"{CRITIC}.model.enable_gradient_checkpointing": True,
        f"{CRITIC}.model.fsdp_config.offload_policy": True,
        f"+{CRITIC}.model.fsdp_config.mixed_precision": FP32,
        f"{CRITIC}.ppo_micro_batch_size_per_gpu": 4,
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": THREE_STEPS,
        "trainer.test_freq": -1,
        "trainer.save_freq": TWO_STEPS,
    }


def test_a_run_gives_the_numbers_of_the_cpu_and_resumes(workspace: Workspace, on_npu: dict[str, str]) -> None:
    chosen = everything(workspace)
    traces = workspace.folder / "npu" / "traces"
    npu = chosen | NPUS | PROFILED | {"global_profiler.save_path": traces}
    on_cpu, run = workspace.train("npu_on_cpu", chosen), workspace.train("npu", npu, on_npu)
    for step, numbers in run.steps.items():
        assert run.numbers(step) == pytest.approx(on_cpu.numbers(step), rel=1e-5, abs=1e-5)
        for phase in ("actor", "actor_infer", "ref", "critic", "critic_infer", "rollout"):
            assert numbers[f"perf/memory/{phase}/max_allocated_gb"] > 1e-3
            assert 0 < numbers[f"perf/mfu/{phase}"] < 1e-3  # of what an Ascend910B promises
    assert_traces(traces)
    saved = {name: merged_weights(each) for name, each in (("cpu", on_cpu), ("npu", run))}
    assert saved["npu"].keys() == saved["cpu"].keys()
    for name, weight in saved["npu"].items():
        torch.testing.assert_close(weight, saved["cpu"][name], rtol=1e-3, atol=1e-3)
    again = {"trainer.resume_mode": "resume_path", "trainer.save_freq": -1, "global_profiler.steps": "[3]"}
    again["trainer.resume_from_path"] = run.folder / f"global_step_{TWO_STEPS}"
    resumed = workspace.train("npu_resumed", npu | again, on_npu)
    assert resumed.steps.keys() == {THREE_STEPS}
    assert resumed.numbers(THREE_STEPS) == run.numbers(THREE_STEPS)
    assert digests_of(resumed) == digests_of(run)


def merged_weights(run: Run) -> dict[str, torch.Tensor]:
    """Merge the checkpoint of a run in a process without torch_npu."""
    folder, merged = run.folder / f"global_step_{TWO_STEPS}" / "actor", run.folder / "merged"
    words = ["merge", "--backend", "fsdp", "--local_dir", str(folder), "--target_dir", str(merged)]
    done = subprocess.run(
        [sys.executable, "-m", "verl.model_merger", *words],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: weight for file in merged.glob("*.safetensors") for name, weight in load_file(file).items()}


def digests_of(run: Run) -> Any:
    """Return the digests of the last step: of what each phase has made, of weights and of random states."""
    return json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["phases"]


def assert_traces(folder: Path) -> None:
    """Hold the traces to the steps, ranks and tasks that were asked for."""
    minis = [["start", "mini_batch 0"], ["end", "mini_batch 0"], ["start", "mini_batch 1"], ["end", "mini_batch 1"]]
    inner = {"actor_update": minis, "critic_update": minis}
    tasks = {"e2e": ["rollout_generate", "actor_compute_log_prob", "actor_update"]}
    tasks |= {name: [name] for name in ("critic_compute_values", "critic_update")}
    wanted = {
        f"step{step}/{name}": (
            "1" if name == "e2e" else "0",
            [event for task in parts for event in ([["start", task], *inner.get(task, []), ["end", task]])],
        )
        for step in (1, 3)
        for name, parts in tasks.items()
    }
    found = {}
    for path in folder.rglob("trace.json"):
        trace = json.loads(path.read_text())
        found[str(path.parents[1].relative_to(folder))] = (trace["rank"], trace["ranges"])
    assert found == wanted


def test_supervised_training_gives_the_numbers_of_the_cpu(workspace: Workspace, on_npu: dict[str, str]) -> None:
    """With adapters, each sequence shared by two devices, as the example does it."""
    rows = [{"question": f"what follows {i}?", "answer": f"it is {i + 1}"} for i in range(16)]
    data = workspace.folder / "questions.parquet"
    pd.DataFrame({"extra_info": rows}).to_parquet(data)
    losses = {}
    for device, environment in (("cpu", {"PYTHONPATH": str(REPOSITORY)}), ("npu", on_npu)):
        script = (REPOSITORY / "examples/sft/gsm8k/run_qwen3_8b_sft_peft_sp2_npu.sh").read_text()
        options = dict(re.findall(r"^    ([\w.]+)=(\S+) \\$", script, flags=re.MULTILINE))
        options |= {"data.train_files": data, "data.val_files": data, "data.train_batch_size": 8}
        options |= {"model.partial_pretrain": workspace.model, "trainer.device": device, "trainer.total_epochs": 1}
        options |= {"trainer.default_local_dir": workspace.folder / f"sft_{device}", "trainer.logger": "[file]"}
        options |= {"data.prompt_dict_keys": "[question]", "data.response_dict_keys": "[answer]"}
        options["trainer.experiment_name"] = f"sft_{device}"
        log = workspace.folder / f"sft_{device}.jsonl"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
                *("-m", "verl.trainer.fsdp_sft_trainer", *(f"{key}={value}" for key, value in options.items())),
            ],
            env=os.environ | environment | {"VERL_FILE_LOGGER_PATH": str(log)},
            cwd=workspace.folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
        losses[device] = [
            [step.get(name, 0) for name in ("train/loss", "train/grad_norm", "val/loss")] for step in steps
        ]
    assert losses["npu"] == [pytest.approx(step, rel=0.02) for step in losses["cpu"]]  # in bf16, and in fp32
    assert len(losses["npu"]) >= TWO_STEPS
