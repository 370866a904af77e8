"""The exceptions that users may catch: their tree, and that they pass from process to process."""

import ast
import pickle
from pathlib import Path

import pytest

from verl import errors
from verl.base_config import ConfigError, UnsupportedConfigError, Violation

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER_ERRORS = (
    errors.WorkerError,
    errors.WorkerDiedError,
    errors.WorkerTaskError,
    errors.WorkerInputError,
    errors.WorkerTimeoutError,
)
CONFIG_ERRORS = (ConfigError, UnsupportedConfigError)
OF_A_MESSAGE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in WORKER_ERRORS
]


def instances() -> list[Exception]:
    """Return an instance of every class."""
    site = errors.CallSite("actor", "actor_rollout", "update_actor", "update", 3)
    violations = [Violation("trainer.nnodes", 0, "must be at least 1")]
    return [
        *(kind("data.train_files=x: no such file") for kind in OF_A_MESSAGE),
        *(kind(violations) for kind in CONFIG_ERRORS),
        *(kind(site, 1, "actor_1", "it ended", (1, 2)) for kind in WORKER_ERRORS),
    ]


@pytest.mark.parametrize("error", instances(), ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: Exception):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) != ""


@pytest.mark.parametrize(
    ("kind", "established"),
    [
        (errors.WrongSetting, AssertionError),
        (ConfigError, AssertionError),
        (errors.UnsupportedInput, NotImplementedError),
        (UnsupportedConfigError, NotImplementedError),
        (errors.PromptTooLongError, NotImplementedError),
        (errors.MissingFile, FileNotFoundError),
        (errors.MissingName, AttributeError),
        (errors.MissingColumn, KeyError),
        (errors.MissingPackage, ImportError),
        (errors.WrongType, TypeError),
        (errors.UserImportError, RuntimeError),
    ],
)
def test_what_established_code_catches_catches_it(kind: type[Exception], established: type[Exception]):
    assert issubclass(kind, established)
    assert issubclass(kind, errors.WrongInput)
    assert issubclass(kind, ValueError)


def test_no_class_of_a_wrong_input_stands_elsewhere_without_a_use():
    """A subclass of WrongInput outside the tree is there because some code catches or inspects it."""
    inputs = {kind.__name__ for kind in OF_A_MESSAGE if issubclass(kind, errors.WrongInput)}
    elsewhere = {
        node.name
        for folder in ("verl", "recipe")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path != REPOSITORY / "verl" / "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and inputs & {ast.unparse(base) for base in node.bases}
    }
    assert elsewhere == {
        "ConfigError",  # lists violations
        "UnsupportedConfigError",
        "HdfsReadError",  # of a file that the user names
        "MediaError",  # its message hides secrets of an address
        "NothingScoredError",  # the trainer skips no row for it
        "SeveralProblems",  # holds the errors of several checks
        "ToolMethodError",  # is no failure of a call
        "TrajectoryInputError",  # holds the attempts
    }
