"""The names of an engine's arguments, read without importing the engine, which takes seconds."""

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
"""Arguments of SGLang that this code reads elsewhere too, or that would break what it relies on."""


@cache
def sglang_arguments() -> frozenset[str]:
    """Return the names of the arguments of SGLang's ``ServerArgs``; none if SGLang is not installed.

    Since 0.5.21 they are the annotated names of the classes in ``srt/arg_groups/fields``.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [each for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
    return frozenset(field.target.id for field in fields if isinstance(field.target, ast.Name))


def wrong_sglang_arguments(given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each name that is no argument of SGLang, or one that other keys decide, and what is wrong with it.

    Where SGLang is not installed, its arguments are not known.
    """
    known = sglang_arguments()
    for name in given:
        if name in _DECIDED:
            yield name, _DECIDED[name]
        elif known and name not in known:
            yield name, f"is no argument of SGLang; the nearest: {', '.join(nearest(name, known))}"
