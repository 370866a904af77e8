"""Write the page of all launch scripts: ``python -m tests.special_sanity.examples_page``; a test compares it."""

import re
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.special_sanity.test_examples import (
    CONFIG_OF_MODULE,
    ROOT,
    SCRIPTS,
    commands_of_script,
)

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
        "accuracy 0.00, after 15 steps too", "docs/advance/search.md"
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


@cache
def devices_of(script: Path) -> str:
    """Return the devices of a script's commands, such as ``2 x 8 GPUs``; empty if it only prepares data."""
    if script.name.startswith("prepare_"):
        return ""
    with TemporaryDirectory() as folder:
        commands = commands_of_script(script, Path(folder), [])
    launches = [words for words in commands if set(words) & set(CONFIG_OF_MODULE)]
    if all(any(word.endswith(".main_eval") for word in words) for words in launches):
        return "none"
    words = [word for launch in launches for word in launch]
    given = dict(word.split("=", 1) for word in words if re.match(r"-*[\w.]+=", word))
    trains_supervised = any(word.endswith("sft_trainer") for word in words)
    nodes = re.findall(r"#SBATCH --nodes=(\d+)", script.read_text()) or [given.get("trainer.nnodes", "1")]
    workers = int(given.get("trainer.n_gpus_per_node", "1" if trains_supervised else "8"))
    if "--nproc_per_node" in given:
        nodes, workers = ["1"], int(given["--nproc_per_node"])
    workers += int(given.get("actor_rollout_ref.rollout.n_gpus_per_node", "0"))  # those that the servers have
    name = {"cuda": "GPU", "npu": "Ascend device", "cpu": "CPU worker"}[given.get("trainer.device", "cuda")]
    count = str(workers) if nodes[0] == "1" else f"{nodes[0]} x {workers}"
    return f"{count} {name}" + ("" if count == "1" else "s")


def link(page: str) -> str:
    """Return a link to a page of the docs, and the name of any other."""
    inside = page.removeprefix("docs/")
    return f"`{page}`" if inside == page else f"[{inside}]({inside})"


def page() -> str:
    """Return the text of the page: the scripts that ran, and all of them by folder and devices."""
    rows = [f"| `{script}` | {result} | {link(page)} |\n" for script, (result, page) in RAN.items()]
    parts = [HEAD, *rows, FOLDERS]
    for (root, folder), scripts in groupby(SCRIPTS, key=lambda script: script.relative_to(ROOT).parts[:2]):
        by_devices: dict[str, list[str]] = {}
        for script in scripts:
            by_devices.setdefault(devices_of(script), []).append(f"`{script.relative_to(ROOT / root / folder)}`")
        parts += [f"| `{root}/{folder}` | {devices} | {', '.join(names)} |\n" for devices, names in by_devices.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
