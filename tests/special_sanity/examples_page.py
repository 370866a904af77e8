"""Write the page of all launch scripts: ``python -m tests.special_sanity.examples_page``; a test compares it."""

import re
from itertools import groupby
from pathlib import Path

from tests.special_sanity.test_examples import NPU_MEGATRON, ROOT, SCRIPTS, SGLANG, WAITING

PAGE = ROOT / "docs" / "examples.md"
STATES = {
    "ran": "trains, evaluates or generates on CPU; tests and the figures of the pages run it",
    "composed": "a test runs the script with a Python that only notes its arguments, composes the configuration, and "
    "applies the checks that a run makes before it starts. Data and local models are stand-ins. The script waits for "
    "the devices in its row",
    "waits for SGLang": "composed with `actor_rollout_ref.rollout.name=vllm`, which also runs it today. Its default is "
    "SGLang, which is refused so far",
    "waits for Megatron-Core on Ascend": "composed for GPUs; this strategy is refused on Ascend",
    "not run": "downloads data; there was no network",
}
HEAD = """# All launch scripts

<!-- python -m tests.special_sanity.examples_page writes this page. -->

Every launch script of `examples/` and `recipe/`: what it runs, the data that it reads, the devices that it asks for,
and how far it has been tried here. The README of each folder says more.

| state | meaning |
|---|---|
"""
WAITS = {SGLANG: "waits for SGLang", NPU_MEGATRON: "waits for Megatron-Core on Ascend"}


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
    if all(module == "main_eval" for module in re.findall(r"-m [\w.]+\.(\w+)", text)):
        return "none"
    kind = value_of(text, "trainer.device", "cuda")
    if "--nproc_per_node" in text:
        nodes, workers = "1", value_of(text, "--nproc_per_node", "1")
    else:
        workers = value_of(text, "trainer.n_gpus_per_node", "1" if "sft_trainer" in text else "8")
        nodes = value_of(text, "trainer.nnodes", "1")
    name = {"cuda": "GPU", "npu": "Ascend device", "cpu": "CPU worker"}[kind]
    count = workers if nodes == "1" else f"{nodes} x {workers}"
    return f"{count} {name}" + ("" if count == "1" else "s")


def settings_of(script: Path) -> str:
    """Return the text of a script; one that only runs another is preceded by the text of that."""
    text = script.read_text()
    other = re.search(r"^[^#\n]*\bbash .*/([\w.-]+\.sh)\b", text, flags=re.MULTILINE)
    return text if other is None or " -m " in text else settings_of(script.with_name(other[1])) + text


def describe(script: Path) -> tuple[str, str, str, str]:
    """Return what a script runs, its data, its devices and how far it has been tried."""
    text = script.read_text()
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    title = re.split(r"(?<!Dr)\.(?:\s|$)|; scripts/", " ".join(comments))[0]
    text = settings_of(script)
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    source = " ".join(line for line in comments if line.startswith("Data first"))
    data = ", ".join(f"`{name}`" for name in dict.fromkeys(re.findall(r"\w+\.(?:py|sh)\b", source)))
    if script.name.startswith("prepare_"):
        return title, data, "", "not run"
    reason = WAITING.get(script.relative_to(ROOT).as_posix())
    state = "ran" if "_cpu" in script.name else WAITS.get(reason, "composed") if reason else "composed"
    return title, data, devices_of(text), state


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, *(f"| {state} | {meaning} |\n" for state, meaning in STATES.items()), "\n"]
    for (root, folder), scripts in groupby(SCRIPTS, key=lambda script: script.relative_to(ROOT).parts[:2]):
        parts.append(f"## {root}/{folder}\n\n| script | runs | data | devices | state |\n|---|---|---|---|---|\n")
        rows = [(f"`{script.relative_to(ROOT / root / folder)}`", *describe(script)) for script in scripts]
        parts += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows]
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
