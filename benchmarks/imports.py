"""CPU seconds that each kind of process of a run spends on imports, by package, by ``python -X importtime``.

python benchmarks/imports.py

Python tells the time that passes, which other work on the machine changes. So the parts are scaled to the CPU seconds
of the whole. Medians of three processes.
"""

import collections
import statistics
import subprocess
import sys

OF_RAY = "from verl.utils.processes import collect_garbage_rarely\ncollect_garbage_rarely()\n"
"""What Ray's processes call first: a collection counts for the package whose import it interrupts."""
PROCESSES = {
    "launching process": "import verl.trainer.main_ppo, verl.trainer.preflight, verl.trainer.run.launch",
    "scorer": "import verl.utils.process_pool",
    "trainer": OF_RAY + "import verl.trainer.main_ppo, verl.trainer.ppo.ray_trainer, verl.workers.fsdp_workers",
    "worker": OF_RAY + "import verl.trainer.main_ppo, verl.workers.fsdp_workers\n"
    "from verl.utils.vllm import import_vllm\nimport_vllm()",
}
LEAST_S = 0.05
REPEATS = 3
CPU = "\nimport time\nprint(time.process_time())"


def seconds_by_package(code: str) -> tuple[collections.Counter[str], float]:
    """Return the CPU seconds in the modules of each package, without what these import, and those of the process."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code + CPU],
        capture_output=True,
        check=True,
        timeout=300,
        encoding="utf-8",
    )
    seconds: collections.Counter[str] = collections.Counter()
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and "imported package" not in line:
            own, _, name = line.removeprefix("import time:").split("|")
            seconds[name.strip().partition(".")[0]] += int(own) / 1e6
    cpu = float(done.stdout.split()[-1])
    scale = cpu / sum(seconds.values())
    return collections.Counter({name: value * scale for name, value in seconds.items()}), cpu


def medians(code: str) -> tuple[dict[str, float], float]:
    """Return what ``seconds_by_package`` does, as medians of several processes."""
    parts, totals = zip(*(seconds_by_package(code) for _ in range(REPEATS)), strict=True)
    packages = {package for seconds in parts for package in seconds}
    return {name: statistics.median(each[name] for each in parts) for name in packages}, statistics.median(totals)


def main() -> None:
    """Print a Markdown table."""
    found = {name: medians(code) for name, code in PROCESSES.items()}
    packages = {package for seconds, _ in found.values() for package, value in seconds.items() if value >= LEAST_S}
    order = sorted(packages, key=lambda package: -max(seconds.get(package, 0.0) for seconds, _ in found.values()))
    lines = ["| package | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for package in order:
        cells = [
            f"{seconds[package]:.2f}" if seconds.get(package, 0.0) >= 0.005 else "" for seconds, _ in found.values()
        ]
        lines.append(f"| {package} | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(f'{cpu:.2f}' for _, cpu in found.values())} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
