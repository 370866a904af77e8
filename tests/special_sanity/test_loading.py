"""One module unpickles files, one opens images, and nothing trusts code of a repository by itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for folder in ("verl", "recipe", "scripts", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]

UNPICKLERS = {
    "pickle": {"load", "loads", "Unpickler", "_Unpickler"},
    "_pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "ray.cloudpickle": {"load", "loads"},
    "dill": {"load", "loads", "load_session", "load_module", "Unpickler"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open", "Shelf", "DbfilenameShelf"},
    "yaml": {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"},
    "pandas": {"read_pickle"},
    "jsonpickle": {"decode", "loads"},
    "multiprocessing.reduction": {"ForkingPickler", "loads"},
    "PIL.Image": {"open"},
    "torch.jit": {"load"},
    "torch.hub": {"load", "load_state_dict_from_url"},
    "torch.package": {"PackageImporter"},
    "torch.serialization": {"load", "add_safe_globals", "safe_globals"},
    "torch.storage": {"_load_from_bytes"},
    "torch.export": {"load"},
    "torch.utils.model_zoo": {"load_url"},
    "torch.distributed.checkpoint": {"load", "load_state_dict"},
    "torch.distributed.checkpoint.state_dict_loader": {"load", "load_state_dict"},
}
"""Functions and classes that can run code from what they read; Pillow starts Ghostscript for PostScript."""

EXCEPTIONS = {
    ("verl/utils/loading.py", "pickle._Unpickler"): "the list of classes stands there",
    ("verl/utils/loading.py", "torch.load"): "it reads by that list",
    ("benchmarks/dispatch.py", "pickle.loads"): "it times the loading of what it has pickled itself",
    ("benchmarks/driver_scaling.py", "pickle.loads"): "it times the loading of what it has pickled itself",
    ("verl/utils/megatron/dist_checkpointing.py", "torch.distributed.checkpoint.load_state_dict"): "it gets a reader "
    "that takes all parts from verl.utils.checkpoint.torch_dist",
    ("verl/utils/vision/images.py", "PIL.Image.open"): "it says which formats may be opened",
    ("verl/utils/process/pool.py", "cloudpickle.loads"): "between a process and the processes that it starts",
}
"""Uses that are right, and why. Ray and torch.distributed unpickle inside themselves what processes of a run send."""


def names_of(tree: ast.Module) -> dict[str, str]:
    """Return what the imported names of a module stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name.split(".")[0]: each.name if each.asname else "" for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    found = {short: full or short for short, full in found.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and dotted(node.value, found) in UNPICKLERS:  # another name for a module
            found |= {each.id: dotted(node.value, found) for each in node.targets if isinstance(each, ast.Name)}
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression, with imports resolved; empty if it has none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def is_true(call: ast.Call, keyword: str) -> bool:
    values = [each.value for each in call.keywords if each.arg == keyword]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def violations(source: str) -> Iterator[str]:
    """Yield what a module calls or names that can run code from a file."""
    tree = ast.parse(source)
    names = names_of(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    weights_only = {id(call.func) for call in calls if is_true(call, "weights_only")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS and node.names[0].name == "*":
            yield f"{node.module}.*"
        if isinstance(node, ast.Attribute | ast.Name):
            full = dotted(node, names)
            package, _, name = full.rpartition(".")
            if name in UNPICKLERS.get(package, ()) or (full == "torch.load" and id(node) not in weights_only):
                yield full
    for node in calls:
        full = dotted(node.func, names)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else full
        named = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
        if full in ("__import__", "importlib.import_module") and named and named[0] in UNPICKLERS:
            yield f"{full}({named[0]})"
        if full == "getattr" and dotted(node.args[0], names) in UNPICKLERS:
            yield f"getattr({dotted(node.args[0], names)})"
        if full.startswith("numpy.") and any(each.arg == "allow_pickle" for each in node.keywords):
            yield f"{full}(allow_pickle)"
        if full == "numpy.load" and len(node.args) > 2:  # the third one is allow_pickle
            yield f"{full}(allow_pickle)"
        if is_true(node, "trust_remote_code"):
            yield f"{method}(trust_remote_code=True)"
        given = {each.arg for each in node.keywords}  # None stands for **options
        if method == "from_pretrained" and ".Auto" in f".{full}" and not given & {"trust_remote_code", None}:
            yield f"{full} without trust_remote_code"  # transformers would ask at the terminal


def test_only_the_module_for_loading_unpickles_files() -> None:
    found = {(path.relative_to(ROOT).as_posix(), use) for path in SOURCES for use in violations(path.read_text())}
    assert found == set(EXCEPTIONS), f"read by verl.utils.loading instead: {sorted(found ^ set(EXCEPTIONS))}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p\np.load(f)",
        "from pickle import loads as read\nread(b)",
        "import pickle\nclass A(pickle.Unpickler): pass",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import yaml\nyaml.load(f, yaml.Loader)",
        "import ray\nray.cloudpickle.loads(b)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(p)",
        "import transformers\ntransformers.AutoConfig.from_pretrained(p, trust_remote_code=True)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(s)",
        "from torch import load\nload(f)",
        "from torch import load as read\nread(f, weights_only=False)",
        "import torch as t\nt.load(f)",
        "import torch\nfrom functools import partial\nread = partial(torch.load, weights_only=True)",
        "import torch\ntorch.load(f, **options)",
        "from numpy import load\nload(f, allow_pickle=True)",
        "import numpy\nnumpy.load(f, None, True)",
        "import joblib\njoblib.load(f)",
        "from joblib import load\nload(f)",
        "import dill as d\nd.loads(b)",
        "import cloudpickle\ncloudpickle.load(f)",
        "from ray import cloudpickle as c\nc.loads(b)",
        "import marshal\nmarshal.loads(b)",
        "from yaml import unsafe_load\nunsafe_load(f)",
        "from pickle import *\nloads(b)",
        "import pickle\np = pickle\np.loads(b)",
        "import pickle\ngetattr(pickle, 'lo' + 'ads')(b)",
        "__import__('pickle').loads(b)",
        "import importlib\nimportlib.import_module('pickle').loads(b)",
        "def f(b):\n    import pickle\n    return pickle.loads(b)",
        "import torch\ntorch.storage._load_from_bytes(b)",
        "from PIL import Image\nImage.open(f)",
        "import PIL.Image\nPIL.Image.open(f)",
        "from PIL.Image import open as read\nread(f)",
    ],
)
def test_what_the_check_finds(source: str) -> None:
    assert list(violations(source))


def test_what_the_check_permits() -> None:
    source = (
        "import json, pickle, torch, yaml\nfrom transformers import AutoConfig, GenerationConfig\n"
        "json.load(f); pickle.dumps(x); torch.load(f, weights_only=True); yaml.safe_load(f)\n"
        "AutoConfig.from_pretrained(p, trust_remote_code=False); GenerationConfig.from_pretrained(p)\n"
    )
    assert not list(violations(source))
