"""Write the page of all launch scripts: ``python -m tests.special_sanity.examples_page``; a test compares it."""

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tests.special_sanity.test_examples import NPU_MEGATRON, ROOT, SCRIPTS, WAITING

PAGE = ROOT / "docs" / "examples.md"
HEAD = """# All launch scripts

<!-- python -m tests.special_sanity.examples_page writes this page. -->

Each script begins with comments: what it runs, the data that it reads and how to make them, the devices. The README of
its folder says more.

## Scripts that ran on a CPU

To their end, or to the step in the row.

| script | what came out | page |
|---|---|---|
"""
FOLDERS = """
## All scripts by devices

A test runs every other script with a Python that only notes its arguments, composes the configuration, and applies the
checks that a run makes before it starts. They wait for their devices. Those of Megatron-Core on Ascend devices are
composed for GPUs, since this strategy is refused there; those without devices download data.

| folder | devices | scripts |
|---|---|---|
"""


class Ran(NamedTuple):
    """What came out of a script that ran to its end, and the page that shows it."""

    result: str
    page: str


RAN = {
    "examples/grpo_trainer/run_tiny_cpu.sh": Ran("accuracy 0.35, after 40 steps 0.99", "docs/algo/baseline.md"),
    "examples/grpo_trainer/run_tiny_cpu_torch_prof.sh": Ran("4 traces of about 7 MB", "docs/perf/profiling.md"),
    "examples/grpo_trainer/run_tiny_megatron_cpu.sh": Ran("accuracy 0.35, after 20 steps 0.96", "docs/verification.md"),
    "examples/grpo_trainer/run_smollm2_135m_cpu.sh": Ran(
        "accuracy 0.25, after 50 steps 0.86", "examples/smollm2_135m/README.md"
    ),
    "examples/ppo_trainer/run_tiny_cpu.sh": Ran("accuracy 0.35, after 40 steps 0.99", "docs/verification.md"),
    "examples/sft/run_tiny_cpu.sh": Ran("a model of accuracy 0.35", "docs/algo/baseline.md"),
    "examples/sft/run_smollm2_135m_cpu.sh": Ran(
        "accuracy 0.25, after 100 steps 0.75", "examples/smollm2_135m/README.md"
    ),
    "examples/sglang_multiturn/run_calculator_cpu.sh": Ran(
        "accuracy 0.14, after 20 steps 1.00", "docs/advance/multi_turn.md"
    ),
    "examples/sglang_multiturn/run_gsm8k_interaction_tiny_cpu.sh": Ran(
        "accuracy 0.33, after 30 steps 0.92", "docs/advance/interactions.md"
    ),
    "examples/sglang_multiturn/search_r1_like/run_search_cpu.sh": Ran(
        "accuracy 0.00, after 15 steps 1.00", "docs/advance/search.md"
    ),
    "examples/split_placement/run_tiny_cpu.sh": Ran(
        "accuracy 0.36, after 40 steps 0.96", "examples/split_placement/README.md"
    ),
    "recipe/char_count/run_char_count_tiny_cpu.sh": Ran(
        "accuracy 0.26, after 40 steps 0.37", "recipe/char_count/README.md"
    ),
    "recipe/collabllm/run_collabllm_tiny_cpu.sh": Ran("reward 0.46, after 6 steps 0.92", "recipe/collabllm/README.md"),
    "recipe/dapo/run_dapo_tiny_cpu.sh": Ran("accuracy 0.30, after 30 steps 1.00", "recipe/dapo/README.md"),
    "recipe/deepeyes/run_deepeyes_tiny_cpu.sh": Ran("accuracy 0.26, after 20 steps 1.00", "recipe/deepeyes/README.md"),
    "recipe/entropy/run_entropy_tiny_cpu.sh": Ran("accuracy 0.35, after 40 steps 1.00", "docs/algo/baseline.md"),
    "recipe/gspo/run_gspo_tiny_cpu.sh": Ran("accuracy 0.35, after 25 steps 0.98", "recipe/gspo/README.md"),
    "recipe/infigui-g1/run_infigui_tiny_cpu.sh": Ran("reward 0.47, after 40 steps 0.78", "recipe/infigui-g1/README.md"),
    "recipe/langgraph_agent/example/run_math_expression_tiny_cpu.sh": Ran(
        "accuracy 0.01, after 20 steps 0.97", "recipe/langgraph_agent/README.md"
    ),
    "recipe/open_math_reasoning/run_open_math_tiny_cpu.sh": Ran(
        "score 0, after 100 steps 0.625", "recipe/open_math_reasoning/README.md"
    ),
    "recipe/prime/run_prime_tiny_cpu.sh": Ran("accuracy 0.36, after 40 steps 0.98", "recipe/prime/README.md"),
    "recipe/r1/run_r1_tiny_cpu.sh": Ran("176 prompts, score 0.0 of random weights", "recipe/r1/README.md"),
    "recipe/retool/run_retool_tiny_cpu.sh": Ran("accuracy 0.04, after 20 steps 1.00", "recipe/retool/README.md"),
    "recipe/spin/run_spin_tiny_cpu.sh": Ran("accuracy 0.35, after 30 steps 0.98", "recipe/spin/README.md"),
    "recipe/sppo/run_sppo_tiny_cpu.sh": Ran("accuracy 0.35, after 30 steps 1.00", "recipe/sppo/README.md"),
}
"""Script for CPU -> its run. A test looks the numbers up in a line of the page."""
WAITS = {NPU_MEGATRON: "waits for Megatron-Core on Ascend"}


def value_of(text: str, key: str, default: str) -> str:
    """Return the last value that a script writes for a key, with the default of its variable."""
    if key == "trainer.nnodes" and "#SBATCH --nodes=" in text:
        key = "#SBATCH --nodes"
    written = re.findall(rf"{re.escape(key)}=\"?([^\s\"\\]+)", text) or [default]
    variable = re.fullmatch(r"\$\{?(\w+)\}?", written[-1])
    if variable is None:
        return written[-1]
    found = re.findall(rf"^(?:export )?{variable[1]}=\"?(?:\$\{{\w+:-)?([^}}\"\s]+)", text, flags=re.MULTILINE)
    return found[-1] if found else written[-1]


def devices_of(text: str) -> str:
    """Return what a script asks for, such as ``2 x 8 GPUs``."""
    if all(
        module == "main_eval" for module in re.findall(r'-m (?:"recipe\.\$\(basename "\$HERE"\)|[\w.]+)\.(\w+)', text)
    ):
        return "none"
    kind = value_of(text, "trainer.device", "cuda")
    if "--nproc_per_node" in text:
        nodes, workers = "1", value_of(text, "--nproc_per_node", "1")
    else:
        workers = value_of(text, "trainer.n_gpus_per_node", "1" if "sft_trainer" in text else "8")
        nodes = value_of(text, "trainer.nnodes", "1")
    servers = value_of(text, "actor_rollout_ref.rollout.n_gpus_per_node", "0")
    if int(servers):  # those that the servers have for themselves
        workers = str(int(workers) + int(servers))
    name = {"cuda": "GPU", "npu": "Ascend device", "cpu": "CPU worker"}[kind]
    count = workers if nodes == "1" else f"{nodes} x {workers}"
    return f"{count} {name}" + ("" if count == "1" else "s")


def settings_of(script: Path) -> str:
    """Return the text of a script; one that only runs another is preceded by the text of that."""
    text = script.read_text()
    other = re.search(r"^[^#\n]*\bbash .*/([\w.-]+\.sh)\b", text, flags=re.MULTILINE)
    return text if other is None or " -m " in text else settings_of(script.with_name(other[1])) + text


def data_of(text: str) -> str:
    """Return the comments that say where the data come from."""
    return " ".join(line for line in text.splitlines() if line.startswith("# Data first"))


def describe(script: Path) -> tuple[str, str, str, str]:
    """Return what a script runs, its data, its devices and how far it has been tried."""
    text = script.read_text()
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    title = re.split(r"(?<!Dr)\.(?:\s|$)|; scripts/", " ".join(comments))[0]
    source = data_of(text)
    text = settings_of(script)
    source = source or data_of(text)
    data = ", ".join(f"`{name}`" for name in dict.fromkeys(re.findall(r"\w+\.(?:py|sh)\b", source)))
    if script.name.startswith("prepare_"):
        return title, data, "", "not run"
    return title, data, devices_of(text), state_of(script.relative_to(ROOT).as_posix())


def link(page: str) -> str:
    """Return a link to a page of the docs, and the name of any other."""
    inside = page.removeprefix("docs/")
    return f"`{page}`" if inside == page else f"[{inside}]({inside})"


def state_of(script: str) -> str:
    """Return how far a script has been tried: a state of the table, with the result of a run."""
    if script in RAN:
        return f"ran: {RAN[script].result} ({link(RAN[script].page)})"
    return WAITS.get(WAITING.get(script), "composed")


def page() -> str:
    """Return the text of the page: the scripts that ran, and all of them by folder and devices."""
    rows = [f"| `{script}` | {result} | {link(page)} |\n" for script, (result, page) in RAN.items()]
    parts = [HEAD, *rows, FOLDERS]
    for (root, folder), scripts in groupby(SCRIPTS, key=lambda script: script.relative_to(ROOT).parts[:2]):
        by_devices: dict[str, list[str]] = {}
        for script in scripts:
            by_devices.setdefault(describe(script)[2], []).append(f"`{script.relative_to(ROOT / root / folder)}`")
        parts += [f"| `{root}/{folder}` | {devices} | {', '.join(names)} |\n" for devices, names in by_devices.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
