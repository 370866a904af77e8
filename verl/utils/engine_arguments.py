"""The names of the arguments of engines and of Ray, read without importing them, which takes seconds."""

import ast
import importlib.util
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from verl.base_config import nearest

_ROLLOUT = "actor_rollout_ref.rollout"
_ONE_NODE = (
    f"is not supported: an engine runs on one node; {_ROLLOUT}.nnodes is the number of nodes with servers "
    "(actor_rollout_ref.hybrid_engine=false)"
)
_DEVICES = "is not supported: an engine has the devices that its actor got"
_MERGED = "is not supported: adapters (actor_rollout_ref.model.lora_rank) reach the engine merged into the weights"
_DECIDED = {
    "model_path": "is decided by actor_rollout_ref.model.path: write it there",
    "tp_size": f"is decided by {_ROLLOUT}.tensor_model_parallel_size: write it there",
    "dp_size": f"is decided by {_ROLLOUT}.data_parallel_size: write it there",
    "ep_size": f"is decided by {_ROLLOUT}.expert_parallel_size: write it there",
    "pp_size": f"is not supported: use {_ROLLOUT}.tensor_model_parallel_size",
    "context_length": f"is decided by {_ROLLOUT}.max_model_len: write it there",
    "load_format": f"is decided by {_ROLLOUT}.load_format: write it there",
    "skip_tokenizer_init": f"is decided by {_ROLLOUT}.skip_tokenizer_init: write it there",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), _ONE_NODE),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step"), _DEVICES),
    **dict.fromkeys(("enable_lora", "lora_paths"), _MERGED),
}
"""Arguments of SGLang that this code reads elsewhere too, or whose change would break its assumptions."""


@cache
def sglang_arguments() -> frozenset[str]:
    """Return the names of the arguments of SGLang's ``ServerArgs``; none if SGLang is not installed.

    Since 0.5.21 they are the annotated names of the classes in ``srt/arg_groups/fields``.
    """
    found = [node for path in _sources("sglang", "srt/arg_groups/fields/*.py") for node in _classes(path)]
    return frozenset(name for node in found for name in _fields(node))


@cache
def vllm_arguments() -> frozenset[str]:
    """Return the names of the arguments of ``vllm.LLM``; none if vLLM is not installed."""
    engine = [node for path in _sources("vllm", "engine/arg_utils.py") for node in _classes(path)]
    names = {name for node in engine if node.name == "EngineArgs" for name in _fields(node)}
    for node in (node for path in _sources("vllm", "entrypoints/llm.py") for node in _classes(path)):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        names |= {each.arg for method in methods if node.name == "LLM" for each in _parameters(method) if names}
    return frozenset(names)


@cache
def ray_arguments() -> frozenset[str]:
    """Return the names of the arguments of ``ray.init``."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _sources("ray", "_private/worker.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    init = [node for node in functions if node.name == "init"]
    return frozenset(each.arg for node in init for each in (*node.args.args, *node.args.kwonlyargs))


def _sources(package: str, pattern: str) -> list[Path]:
    """Return files of a package; none if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return [path for folder in folders for path in Path(folder).glob(pattern)]


def _classes(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the annotated names of a class."""
    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    return [each.id for each in fields if isinstance(each, ast.Name)]


def _parameters(method: ast.FunctionDef) -> list[ast.arg]:
    return [*method.args.args[1:], *method.args.kwonlyargs]


def wrong_sglang_arguments(given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that SGLang does not take, or that another key decides, with the reason.

    Where SGLang is not installed, its arguments are not known.
    """
    known = sglang_arguments()
    for name in given:
        if name in _DECIDED:
            yield name, _DECIDED[name]
        elif known and name not in known:
            yield name, f"is no argument of SGLang; the nearest: {', '.join(nearest(name, known))}"


def wrong_vllm_arguments(given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that vLLM does not take, with the reason; nothing where vLLM is not installed."""
    known = vllm_arguments()
    for name in given:
        if known and name not in known:
            yield name, f"is no argument of vLLM; the nearest: {', '.join(nearest(name, known))}"
