"""The ``data`` node: files, columns, lengths, batches and classes of the user."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from verl.base_config import MOST_SEED, BaseConfig, Violation, build_node, collected_violations, setting
from verl.utils.vision.limits import MediaConfig

MOST_PROCESSES = 1024
TRUNCATIONS = ("error", "left", "right", "middle")

Node = Mapping[str, Any]
"""A node of the configuration: a plain dict, a DictConfig, or a config dataclass."""


@dataclass
class CustomClassConfig(BaseConfig):
    """A class of the user, in place of the built-in one."""

    path: str | None = setting(None, "Python file or pkg://module that holds the class; null takes the built-in one")
    name: str | None = setting(None, "name of the class")

    def rules(self) -> Iterator[Violation]:
        """Yield a file without a class, and a class without a file."""
        yield from half_named_class(("path", self.path), ("name", self.name))


@dataclass
class SamplerConfig(BaseConfig):
    """A sampler of the user, for instance a curriculum."""

    class_path: str | None = setting(None, "Python file or pkg://module that holds the class")
    class_name: str | None = setting(None, "name of the class, derived from AbstractSampler")

    def rules(self) -> Iterator[Violation]:
        """Yield a file without a class, and a class without a file."""
        yield from half_named_class(("class_path", self.class_path), ("class_name", self.class_name))


def half_named_class(path: tuple[str, str | None], name: tuple[str, str | None]) -> Iterator[Violation]:
    """Yield the missing half of a class that is named by its file and its name; both are (key, value)."""
    if path[1] is not None and name[1] is None:
        yield Violation(name[0], None, f"is missing: name the class in {path[1]}")
    if path[1] is None and name[1] is not None:
        yield Violation(path[0], None, f"is missing: write the file that holds {name[1]}")


@dataclass
class DataConfig(BaseConfig):
    """Training and validation rows, and how they become batches."""

    tokenizer: str | None = setting(None, "for a data set of the user; else null")
    use_shm: bool = setting(False, "read the files from a copy in shared memory")
    train_files: str | list[str] = setting("~/data/rlhf/gsm8k/train.parquet", "training rows: a file or a list")
    val_files: str | list[str] | None = setting("~/data/rlhf/gsm8k/test.parquet", "validation rows: a file or a list")
    train_max_samples: int = setting(-1, "first rows of the training files that are read; -1: all", at_least=-1)
    val_max_samples: int = setting(-1, "first rows of the validation files that are read; -1: all", at_least=-1)
    prompt_key: str = setting("prompt", "column of the prompt, a list of messages", empty=False)
    reward_fn_key: str = setting("data_source", "column whose value selects the scorer", empty=False)
    max_prompt_length: int = setting(512, "tokens of the longest prompt", at_least=1)
    max_response_length: int = setting(512, "tokens of the longest response", at_least=1)
    train_batch_size: int = setting(1024, "prompts of one training step", at_least=1)
    gen_batch_size: int | None = setting(None, "prompts of one loader batch; null: train_batch_size", at_least=1)
    val_batch_size: int | None = setting(None, "deprecated: prompts of one validation batch", at_least=1)
    return_raw_input_ids: bool = setting(False, "for a data set of the user; else false")
    return_raw_chat: bool = setting(False, "rows carry their messages as raw_prompt")
    return_full_prompt: bool = setting(False, "rows carry their templated text as full_prompts")
    shuffle: bool = setting(True, "training rows come in random order")
    seed: int | None = setting(None, "seed of that order; null: trainer.seed", at_most=MOST_SEED)
    dataloader_num_workers: int = setting(
        8, "processes that prepare rows; at most the cores", at_least=0, at_most=MOST_PROCESSES
    )
    validation_shuffle: bool = setting(False, "validation rows come in random order")
    filter_overlong_prompts: bool = setting(False, "drop rows whose prompt exceeds max_prompt_length")
    filter_overlong_prompts_workers: int = setting(1, "processes that count tokens for the filter", at_least=1)
    truncation: str = setting("error", "what happens to longer prompts", one_of=TRUNCATIONS)
    image_key: str | None = setting("images", "column of the images; null: <image> is text", empty=False)
    video_key: str | None = setting("videos", "column of the videos; null: <video> is text", empty=False)
    trust_remote_code: bool = setting(False, "code from the tokenizer's repository may run in the driver")
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    return_multi_modal_inputs: bool = setting(True, "rows carry the tensors of the image processor")
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    datagen: CustomClassConfig = field(default_factory=CustomClassConfig)
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "further arguments of the chat template")
    cache_dir: str | None = setting(None, "folder of downloaded files")
    need_tools_kwargs: bool = setting(False, "default for rows without extra_info.need_tools_kwargs")
    limit_images: int | None = setting(None, "images of the longest prompt")
    limit_mm_per_prompt: dict[str, Any] | None = setting({}, "most images and videos of a prompt, by kind")
    mm_processor_kwargs: dict[str, Any] | None = setting({}, "arguments of the processor of images and videos")
    media: MediaConfig = field(default_factory=MediaConfig)
    prompt_tools: dict[str, Any] | None = setting(
        None, "tools that agent loops show with prompts, as JSON, and which loops do"
    )
    response_key: str = setting("response", "supervised training: column of the response")
    prompt_dict_keys: list[str] | None = setting(None, "supervised training: path of the prompt in its column")
    response_dict_keys: list[str] | None = setting(None, "supervised training: path of the response in its column")
    messages_key: str = setting("messages", "supervised training: column of the messages")
    tools_key: str = setting("tools", "supervised training: column of the tools")
    enable_thinking_key: str = setting("enable_thinking", "supervised training: column of the switch of thinking")
    max_length: int = setting(1024, "supervised training: tokens of the longest row", at_least=1)
    image_patch_size: int | None = setting(
        None, "side of a patch of the vision tower in pixels; null: that of the processor", at_least=1
    )
    ignore_input_ids_mismatch: bool | None = setting(
        None, "supervised training: rows whose turns render otherwise in the whole; true: as they are, false: refused"
    )
    pad_mode: str = setting("right", "supervised training: where rows are padded")

    def rules(self) -> Iterator[Violation]:
        """Yield loader processes next to a sampler of the user."""
        if self.sampler["class_path"] is not None and self.dataloader_num_workers != 0:
            expected = "must be 0 with data.sampler.class_path"
            yield Violation("dataloader_num_workers", self.dataloader_num_workers, expected)

    @classmethod
    def of_data_set(cls, node: Node) -> Self:
        """Read the keys of a node for a data set that a caller constructs, with the defaults of data sets.

        A null counts as left out, except for the columns of media. The data set checks what it reads.
        """
        cores = os.cpu_count() or 1
        defaults: dict[str, Any] = {
            "cache_dir": "~/.cache/verl/rlhf",
            "max_prompt_length": 1024,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": max(1, cores // 4),
        }
        nodes = ("custom_cls", "sampler", "datagen", "media")
        keys = [each.name for each in fields(cls) if each.name not in nodes]
        with collected_violations():
            given = {key: node[key] for key in keys if node.get(key) is not None}
            without = dict.fromkeys(key for key in ("image_key", "video_key") if key in node and node[key] is None)
            media = build_node(node.get("media") or {}, MediaConfig)
            return cls(**defaults | given | without, media=media)

    def media_columns(self) -> dict[str, str]:
        """Return the column of each kind of media that has one; markers of other kinds are plain text."""
        columns = {"image": self.image_key, "video": self.video_key}
        return {kind: name for kind, name in columns.items() if name is not None}

    @property
    def order(self) -> str:
        """The setting that chooses the order of the training rows."""
        name = self.sampler["class_name"]
        return f"data.shuffle={str(self.shuffle).lower()}" if name is None else f"data.sampler.class_name={name}"

    @property
    def loader_batch_size(self) -> int:
        """The prompts of one batch of the training loader."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def prompts_per_step(self) -> int:
        """The prompts of one training step, unless dynamic sampling chooses them."""
        return self.loader_batch_size

    def most_rows(self, is_train: bool) -> int:
        """Return the number of rows to read from the files, from the first one on; -1 for all."""
        return self.train_max_samples if is_train else self.val_max_samples

    @property
    def train_paths(self) -> list[str]:
        """The training files."""
        return _as_list(self.train_files)

    @property
    def val_paths(self) -> list[str]:
        """The validation files."""
        return _as_list(self.val_files)


def _as_list(files: str | list[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or ())


def order_problem(saved: str | None, own: str) -> str | None:
    """Return why a run cannot continue in the saved order of the data; None if it can, or if none was saved.

    Two samplers of the user may read each other's state.
    """
    if saved is None or saved == own or not any(each.startswith("data.shuffle") for each in (saved, own)):
        return None
    return (
        f"{own}, and {saved} in the checkpoint: its position belongs to another order of the rows; write {saved}, or "
        "set trainer.resume_mode=disable"
    )
