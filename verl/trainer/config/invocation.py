"""The mode of this process's command: run, or ``--check``."""

from dataclasses import dataclass, field

from verl.base_config import ConfigError, Violation

CHECK = "--check"
NOT_LOOKED_AT = f"data, models and your code were not looked at: {CHECK} looks at all"


@dataclass
class Call:
    """A command line: whether it only checks, and the keys that a check has refused and left out."""

    only_checks: bool = False
    refused: list[Violation] = field(default_factory=list)


call = Call()


def only_checks() -> bool:
    """Whether the command was called to check its inputs and stop."""
    return call.only_checks


def refused_keys() -> list[Violation]:
    """Return the overrides that a check left out, because no configuration can hold them."""
    return call.refused


def noted(error: ConfigError) -> ConfigError:
    """Add to an error, unless the command is ``--check``, that the remaining checks were not made."""
    if not only_checks():
        error.add_note(NOT_LOOKED_AT)
    return error
