"""Established path of a merge as an object; see ``verl.model_merger.base`` and ``verl.model_merger.merger``."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from verl.errors import CheckpointError
from verl.model_merger.__main__ import build_parser
from verl.model_merger.base import MergeOptions
from verl.model_merger.merger import check_upload, compare, merge, upload


@dataclass
class ModelMergerConfig:
    """The checkpoint and the operation on it, ``merge`` or ``test``."""

    operation: str
    backend: str
    target_dir: str | None = "tmp"
    hf_upload_path: str | None = None
    private: bool = False
    test_hf_dir: str | None = None
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    is_value_model: bool = False
    local_dir: str | None = None
    hf_model_config_path: str | None = None
    hf_upload: bool = field(init=False)
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        if self.operation not in ("merge", "test"):
            raise ValueError(f"operation must be merge or test, got {self.operation!r}")
        self.hf_upload = self.operation == "merge" and bool(self.hf_upload_path)
        if self.operation == "test":
            self.target_dir = self.hf_upload_path = None
            self.private = False


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of ``python -m verl.model_merger``; the subcommand is also the ``operation``."""
    args = build_parser().parse_args(arguments)
    args.operation = args.command
    return args


def generate_config_from_args(args: argparse.Namespace) -> ModelMergerConfig:
    """Return the configuration of a parsed command line."""
    names = [name for name, each in ModelMergerConfig.__dataclass_fields__.items() if each.init]
    return ModelMergerConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})


class BaseModelMerger:
    """Merges one checkpoint, or compares it with a folder.

    Raises: CheckpointError if the checkpoint is incomplete, does not match its configuration, or differs.
    """

    backend: ClassVar[str]

    def __init__(self, config: ModelMergerConfig) -> None:
        if config.backend != self.backend:
            raise ValueError(f"backend must be {self.backend!r} for {type(self).__name__}, got {config.backend!r}")
        if not config.local_dir:
            raise ValueError(f"local_dir must name the folder of one role, got {config.local_dir!r}")
        self.config = config
        shared = MergeOptions.__dataclass_fields__.keys() & ModelMergerConfig.__dataclass_fields__.keys()
        self.options = MergeOptions(**{name: getattr(config, name) for name in shared})

    def merge_and_save(self) -> None:
        """Write the merged folder and upload it if asked to, or compare, as ``operation`` says."""
        if self.config.operation == "test":
            differences = compare(self.options, str(self.config.test_hf_dir))
            if differences:
                raise CheckpointError(f"{len(differences)} tensors differ, the first: {differences[0]}")
            return
        if self.config.hf_upload:
            check_upload(str(self.config.hf_upload_path))
        folder = merge(self.options, str(self.config.target_dir))
        if self.config.hf_upload:
            self.upload_to_huggingface(folder)

    def upload_to_huggingface(self, folder: str | Path | None = None) -> str:
        """Upload the merged folder to the hub and return the URL of the commit."""
        return upload(Path(folder or str(self.config.target_dir)), str(self.config.hf_upload_path), self.config.private)

    def cleanup(self) -> None:
        """Do nothing: a merge keeps no process group and no open file."""
