"""Check the title of a pull request: ``[{modules}] {type}: {description}``, with ``[BREAKING]`` in front if needed.

python scripts/check_pr_title.py "[rollout, vllm] fix: the engine keeps its cache"
"""

import re
import sys

MODULES = frozenset(
    "algo algos bench cfg checkpoint checkpoint_engine ckpt ci compat config data deployment device doc docker docs "
    "env examples fsdp hardware interactions megatron misc mcore model models observe perf profiler protocol ray "
    "recipe reward rewards rollout sandbox scripts sft sglang single_controller sync tests third_party tool tools "
    "trainer training_utils utils vision vllm worker workers".split()
)
"""The modules that a title may name: folders of ``verl/`` and the repository, backends, and their established names."""

TYPES = ("feat", "fix", "refactor", "perf", "test", "docs", "style", "chore")

FORM = "[{modules}] {type}: {description}"
BREAKING = "[BREAKING]"
MAX_LENGTH = 120

_TITLE = re.compile(
    r"^(?P<breaking>\[BREAKING\] ?)?\[(?P<modules>[^\[\]]*)\] (?P<type>[^\s:]+): (?P<description>\S.*)$"
)


def problems(title: str) -> list[str]:
    """Return the problems of a title; an empty list if there are none."""
    match = _TITLE.match(title)
    if match is None:
        return [f"the form is '{FORM}', with {BREAKING} in front if a public interface changes"]
    found = []
    modules = [module.strip() for module in match["modules"].split(",")]
    unknown = [module for module in modules if module not in MODULES]
    if unknown:
        found.append(f"unknown modules {unknown}; choose from {', '.join(sorted(MODULES))}")
    if len(set(modules)) < len(modules):
        found.append("a module is named twice")
    if match["type"] not in TYPES:
        found.append(f"unknown type {match['type']!r}; choose from {', '.join(TYPES)}")
    if len(title) > MAX_LENGTH:
        found.append(f"the title has {len(title)} characters, at most {MAX_LENGTH} are allowed")
    if match["description"].endswith("."):
        found.append("the description ends without a period")
    return found


def main(arguments: list[str]) -> int:
    """Print the problems of the title and return the exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    found = problems(arguments[0])
    for problem in found:
        print(f"title {arguments[0]!r}: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
