"""The exceptions that users may catch, in one tree.

``WrongInput`` is the root of what a user can correct: the command ends with exit code 2, and the message names the key,
file or row. The others end it with 1. The second base of a class is the type that established code raises, and forks
may catch. ``ConfigError``, which lists what is wrong with a configuration, is a ``WrongSetting`` of
``verl.base_config``. An exception that a module raises and catches itself stays in that module.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Wrong input


class WrongInput(ValueError):
    """A key, a file, a row or a function of the user cannot be used: the command ends with exit code 2."""


class WrongSetting(WrongInput, AssertionError):
    """A setting has a value that it cannot have."""


class UnsupportedInput(WrongInput, NotImplementedError):
    """This version does not support what the user asks for."""


class MissingFile(WrongInput, FileNotFoundError):
    """A file that the user names does not exist."""


class MissingName(WrongInput, AttributeError):
    """A function, a class or an attribute that the user names does not exist."""


class MissingPackage(WrongInput, ImportError):
    """A setting needs a package that is not installed."""


class WrongType(WrongInput, TypeError):
    """A class, a function or a value of the user has the wrong type or signature."""


class MissingColumn(WrongInput, KeyError):
    """A batch lacks a column that its reader needs."""

    __str__ = ValueError.__str__  # that of KeyError quotes the message


class DataError(WrongInput):
    """A data file or one of its rows cannot be used."""


class SequenceTooLongError(UnsupportedInput):
    """A sequence exceeds its limit under ``truncation=error``."""


class RowTooLongError(DataError, SequenceTooLongError):
    """A row exceeds ``data.max_length`` under ``truncation=error``."""


class PromptTooLongError(DataError, SequenceTooLongError):
    """A prompt exceeds ``data.max_prompt_length`` under ``truncation=error``."""


class ChatFormatError(WrongInput):
    """A chat template does not render conversations as training needs them."""


class TokenizerNotFoundError(WrongInput, OSError):
    """A folder or a repository of the hub holds no tokenizer that can be loaded."""


class ModelWeightsError(WrongInput, RuntimeError):
    """The weights of a model cannot be loaded."""


class CheckpointError(WrongInput):
    """A checkpoint cannot be used; the message gives the reason and a remedy."""


class UntrustedClassError(CheckpointError):
    """A file names classes or functions that are not listed."""


class ExternalModuleError(WrongInput, ImportError):
    """A module that ``VERL_USE_EXTERNAL_MODULES`` or ``model.external_lib`` names cannot be imported."""


class UserImportError(WrongInput, RuntimeError):
    """A file of the user cannot be executed."""


class RewardFunctionImportError(UserImportError):
    """The file of the reward function cannot be executed."""


class RewardError(WrongInput):
    """A scorer failed, or returned something that is no score."""


class PrecisionError(WrongInput, RuntimeError):
    """The spelling of a precision is unknown."""


class PlacementError(WrongInput, RuntimeError):
    """The cluster lacks the resources that a pool asks for."""


# A misuse of the library, by code of the user or of a fork


class ContractError(ValueError, AssertionError):
    """A caller gives arguments that a function does not take, or that do not fit each other."""


# What ends a run


class Phase(NamedTuple):
    """The name of a phase and the step it belongs to."""

    name: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        where = f"phase {self.name}" if self.name else "no phase set"
        return where if self.step is None else f"{where}, step {self.step}"


@dataclass(frozen=True)
class CallSite:
    """A call of the driver: group, role and method, and the phase and step that it had set."""

    group: str
    role: str
    method: str
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        return f"method {self.method}, role {self.role}, {Phase(self.phase, self.step)}"


@dataclass(eq=False, repr=False)
class WorkerError(RuntimeError):
    """A call to a worker group failed, and its actors have been ended.

    ``rank`` is the first rank that failed, ``ranks`` are all of them; ``group`` to ``step`` are those of ``site``.
    """

    site: CallSite
    rank: int
    actor_name: str
    last_error: str
    ranks: tuple[int, ...] = ()
    what = "failed"

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.rank,)
        self.group = self.site.group
        self.role = self.site.role
        self.method = self.site.method
        self.phase = self.site.phase
        self.step = self.site.step
        names = f"rank {self.rank}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        actor = f"worker {names} of group {self.group!r} (actor {self.actor_name!r})"
        super().__init__(f"{actor} {self.what}: {self.site}: {self.last_error}")

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[CallSite, int, str, str, tuple[int, ...]]]:
        return type(self), (self.site, self.rank, self.actor_name, self.last_error, self.ranks)


class WorkerDiedError(WorkerError):
    """A worker's process ended while the driver waited for the group."""

    what = "died"


class WorkerTaskError(WorkerError):
    """A worker's method raised an exception, which is the cause of this one."""

    what = "raised an exception"


class WorkerInputError(WorkerTaskError, WrongInput):
    """A worker's method refused something that the user gave."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer before the deadline."""

    what = "did not answer in time"


class LostProcessError(RuntimeError):
    """A process that the run depends on has died, or does not answer."""


class ServerError(RuntimeError):
    """A rollout server is gone, or did not answer before its deadline; the message names it."""


class RequestTimeoutError(TimeoutError):
    """A rollout server lives, but did not answer a request before its deadline; the message names both."""


class RequestAbortedError(RuntimeError):
    """A rollout server ended a request before its response was whole, although no caller aborted it."""


class NoTurnError(RuntimeError):
    """An agent ended without an answer of the model, so there is nothing to train."""


class SandboxError(RuntimeError):
    """The sandbox failed; the program is not at fault."""


class WeightSyncError(RuntimeError):
    """An update of the rollout's weights failed on a rank, so no rank uses it."""


class LedgerError(RuntimeError):
    """The ledger of asynchronous training cannot be read or written, or one of its events was changed."""


class LedgerFileError(LedgerError, WrongInput):
    """A file is no ledger of asynchronous training that this version can read."""
