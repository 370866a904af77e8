"""Check that the data files, Python files and folders of a configuration exist and can be used.

Python files are read, not executed.
"""

import ast
import inspect
import os
import sys
from collections.abc import Iterator, Mapping

from verl.base_config import Violation, one_line
from verl.trainer.config.run_config import RunConfig
from verl.utils.checkpoint.files import step_in_name
from verl.utils.fs import existing_part, unreadable_kind
from verl.utils.import_utils import installed_file, python_file
from verl.utils.json_types import Json
from verl.workers.rewards.signature import ASYNCHRONOUS, SCORER_CALLS, call_problem, class_in_file

RUN_FOLDERS = ("default_local_dir", "rollout_data_dir", "validation_data_dir")
"""Keys of ``trainer`` that name folders of a run."""
RUN_NAMES = ("project_name", "experiment_name")
"""Keys of ``trainer`` that are parts of paths."""


def file_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield missing data and Python files, functions that their file does not define, and unwritable folders."""
    yield from name_rules({f"trainer.{name}": run.trainer[name] for name in RUN_NAMES})
    yield from folder_rules({f"trainer.{name}": run.trainer[name] for name in RUN_FOLDERS})
    yield from resume_rules(run.trainer.resume_mode, run.trainer.resume_from_path)
    yield from _validation_file_rules(run)
    if run.data.custom_cls.path is None:  # a data set of the user finds its rows itself
        yield from data_file_rules("data.train_files", run.data.train_files, required=True)
        yield from data_file_rules("data.val_files", run.data.val_files, required=False)
    scorer = run.custom_reward_function
    sampler = run.data.sampler
    key = "reward_model.reward_manager"
    if in_file := class_in_file(run.reward_model.reward_manager):
        yield from python_file_rules(key, in_file[0], key, in_file[1])[0]
    for node, path_key, path, name_key, name in (
        ("custom_reward_function", "path", scorer.path, "name", scorer.name),
        ("data.custom_cls", "path", run.data.custom_cls.path, "name", run.data.custom_cls.name),
        ("data.sampler", "class_path", sampler.class_path, "class_name", sampler.class_name),
        ("data.datagen", "path", run.data.datagen.path, "name", run.data.datagen.name),
    ):
        if path is None:
            continue
        violations, module = python_file_rules(f"{node}.{path_key}", path, f"{node}.{name_key}", name)
        if node == "custom_reward_function" and module is not None and not has_further_names(module):
            yield from scorer_rules(run, module)
        yield from violations


def name_rules(names: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield names that would lead out of their folder, such as ``../x``."""
    for key, name in names.items():
        if isinstance(name, str) and (name[:1] in ("/", "~") or os.path.normpath(name).split("/")[0] == os.pardir):
            expected = "leads out of the folder of its runs: write a name without .., such as team/run"
            yield Violation(key, name, expected)


def folder_rules(folders: Mapping[str, Json]) -> Iterator[Violation]:
    """Yield folders whose path is a file, or that cannot be written although their parent exists."""
    for key, path in folders.items():
        if not isinstance(path, str) or not path or "://" in path:
            continue
        folder = os.path.abspath(os.path.expanduser(path))
        existing = existing_part(folder)
        if not os.path.isdir(existing):
            yield Violation(key, path, f"must be a folder: {existing} is a file")
        elif existing in (folder, os.path.dirname(folder)) and not os.access(existing, os.W_OK | os.X_OK):
            yield Violation(key, path, f"{existing} cannot be written: write another folder")


def resume_rules(mode: str, path: str | None) -> Iterator[Violation]:
    """Yield a checkpoint to resume from that does not exist."""
    if mode != "resume_path":
        return
    if path is None or step_in_name(path) is None:
        expected = "must name a global_step_<N> folder with trainer.resume_mode=resume_path"
        yield Violation("trainer.resume_from_path", path, expected)
    elif not os.path.isdir(os.path.expanduser(path)):
        yield Violation("trainer.resume_from_path", path, "no such folder: write a checkpoint's global_step_<N>")


def _validation_file_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield a run that validates without a file."""
    trainer = run.trainer
    switches = {
        "val_before_train": trainer.val_before_train,
        "val_only": trainer.val_only,
        "test_freq": trainer.test_freq > 0,
    }
    asked = ", ".join(f"trainer.{name}" for name, is_on in switches.items() if is_on)
    if asked and run.data.val_files is None:
        verb = "ask" if "," in asked else "asks"
        expected = f"{asked} {verb} for validation: name a file, or write "
        yield Violation("data.val_files", None, f"{expected}trainer.val_before_train=false and trainer.test_freq=-1")


def data_file_rules(key: str, value: Json, required: bool) -> Iterator[Violation]:
    """Yield the data files of a key that cannot be read; ``value`` is a path or a list of paths."""
    files = [value] if isinstance(value, str) else value
    if files is None and not required:
        return
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        yield Violation(key, value, "must be a path or a list of paths of parquet files")
        return
    for file in files:
        expanded = os.path.expanduser(file)
        if "://" in file:
            continue
        problem = unreadable_kind(expanded)
        if problem is not None:
            yield Violation(key, file, f"{problem}: write the path of a parquet file")
        elif os.path.isdir(expanded):
            yield Violation(key, file, "is a folder: write the parquet file in it")
        elif not os.path.isfile(expanded):
            expected = "no such file: examples/data_preprocess/gsm8k.py writes one, or give the right path"
            yield Violation(key, file, expected)
        elif os.path.getsize(expanded) == 0:
            yield Violation(key, file, "is empty: write it again")


# ---- Python files of the user: do they define the names given, and can a manager call the scorer?


_SCORER = "custom_reward_function"
_VALUES = ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr


def python_file_rules(path_key: str, path: str, name_key: str, name: Json) -> tuple[list[Violation], ast.Module | None]:
    """Return the faults of a Python file and of the name that it should define, and its syntax tree."""
    file = python_file(path) or installed_file(path)
    if file is None:
        return [], None  # the workers import a module that this process does not find
    if not file.is_file():
        what = "is a folder" if file.is_dir() else unreadable_kind(file) or "no such file"
        expected = f"{what}: write the path of a Python file, or pkg:// and the name of an installed module"
        return [Violation(path_key, path, expected)], None
    if file.suffix != ".py":
        return [Violation(path_key, path, "must be a Python file: give it a name that ends in .py")], None
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), file.name)
        compile(module, file.name, "exec", dont_inherit=True)  # finds a `return` outside a function too
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        reason = one_line(f"{error}") or type(error).__name__
        return [Violation(path_key, path, f"is not valid Python: {reason}: correct it, or name another file")], None
    defined = {
        getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "asname", None)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Name | ast.alias)
    }
    if not isinstance(name, str) or name in defined or has_further_names(module):
        return [], module
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    expected = f"{path} does not define it; it defines {', '.join(functions) or 'nothing'}"
    return [Violation(name_key, name, expected)], module


def may_register(path: str | None) -> bool:
    """Whether the file of a custom reward function may register a reward manager when it is run.

    That is so if the file contains ``register``, or imports anything but the standard library and this package.
    """
    file = None if path is None else python_file(path)
    if file is None:
        return path is not None  # an installed module may do anything
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), file.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return False  # ``python_file_rules`` tells why
    for node in ast.walk(module):
        if "register" in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)):
            return True
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] not in (*sys.stdlib_module_names, "verl") for name in names):
            return True
    return False


def has_further_names(module: ast.Module) -> bool:
    """Whether a file has ``import *`` or ``__getattr__``, so that its source does not show all of its names."""
    imports_everything = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(module))
    return imports_everything or _last_definition(module, "__getattr__") is not None


def scorer_rules(run: RunConfig, module: ast.Module) -> Iterator[Violation]:
    """Yield why the scorer that ``custom_reward_function`` names cannot be called.

    Silent if only running the file would tell.
    """
    name = run.custom_reward_function.name
    definition = _last_definition(module, name)
    if isinstance(definition, _VALUES):
        yield Violation(f"{_SCORER}.name", name, "must be a function, the file gives it a value: define it with `def`")
    elif isinstance(definition, ast.AsyncFunctionDef):
        yield Violation(f"{_SCORER}.name", name, ASYNCHRONOUS)
    elif isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        manager = run.reward_model.reward_manager
        if manager not in SCORER_CALLS:
            return
        signature = _signature(definition)
        problem = call_problem(signature, SCORER_CALLS[manager].example(), run.custom_reward_function.reward_kwargs)
        if problem is not None:
            shown = ast.unparse(definition.args)
            expected = (
                f"{name}({shown}) cannot be called by the manager {manager!r} {problem}; write these parameters, or "
                f"pass others by {_SCORER}.reward_kwargs"
            )
            yield Violation(f"{_SCORER}.name", name, expected, others=("reward_model.reward_manager",))


def _last_definition(module: ast.Module, name: Json) -> ast.AST | None:
    """Return the last definition of a name; None if it depends on branches or imports."""
    found: ast.AST | None = None
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            found = node
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found = node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _binds(node, name):
            return None
    return found


def _binds(node: ast.AST, name: Json) -> bool:
    return any(
        getattr(each, "name", None) == name
        or getattr(each, "asname", None) == name
        or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name)
        for each in ast.walk(node)
    )


def _signature(definition: ast.FunctionDef) -> inspect.Signature:
    """Return the parameters of a definition, without evaluating defaults and without annotations."""
    given = definition.args
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [None if default is None else ast.Constant(...) for default in given.kw_defaults]
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    empty = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(empty, definition.name, "eval")))
