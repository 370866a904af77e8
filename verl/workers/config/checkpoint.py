"""The contents of a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from verl.base_config import BaseConfig, Violation

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig(BaseConfig):
    """The parts of a checkpoint to save and to restore."""

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    load_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    async_save: bool = False

    def rules(self) -> Iterator[Violation]:
        """Yield parts that do not exist."""
        for key in ("save_contents", "load_contents"):
            unknown = [part for part in getattr(self, key) if part not in CONTENTS]
            if unknown:
                expected = f"has unknown parts {', '.join(unknown)}: write parts of [{','.join(CONTENTS)}]"
                yield Violation(key, getattr(self, key), expected)
