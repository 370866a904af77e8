"""Where the record of a run lies."""

from pathlib import Path

from verl.utils.observe.record import RECORD_NAME


def record_of(run: str | Path) -> Path:
    """Return the record of a run, given its folder or the record itself.

    Raises: FileNotFoundError saying what to give.
    """
    path = Path(run)
    path = path if path.is_file() else path / RECORD_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the trainer.default_local_dir of a run")
    return path
