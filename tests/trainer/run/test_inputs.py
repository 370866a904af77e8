"""Columns that the user names, and that no data file has."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl.errors import WrongInput
from verl.trainer.preflight import check_written_names
from verl.trainer.run import inputs
from verl.trainer.sft.preflight import check_rows
from verl.utils.dataset.config import DataConfig


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """A training file, and a validation file with other columns."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {"train": {"extra_info": {"index": 0}}, "val": {"pictures": ["a.png"], "functions": "[]"}}
    found = []
    for name, more in rows.items():
        found.append(str(tmp_path / f"{name}.parquet"))
        pq.write_table(pa.Table.from_pylist([{"prompt": said[:1], "messages": said, **more}]), found[-1])
    return found


def rl(paths: list[str], **data: Any) -> None:
    check_written_names(DataConfig(train_files=paths[0], val_files=paths[1], **data))


def sft(paths: list[str], **data: Any) -> None:
    check_rows(OmegaConf.create({"train_files": paths[0], "val_files": paths[1], "messages_key": "messages", **data}))


REFUSED = {
    "images": (rl, {"image_key": "photos"}, r"data\.image_key=photos: no data file has this column, they have \["),
    "videos": (rl, {"video_key": "clips"}, r"data\.video_key=clips: .*'pictures', 'prompt'\]: write one of them"),
    "fields of tools": (
        rl,
        {"need_tools_kwargs": True},
        r"data\.need_tools_kwargs=true: no data file has extra_info\.",
    ),
    "images of conversations": (sft, {"image_key": "photos"}, r"data\.image_key=photos: no data file has this column"),
    "tools of conversations": (sft, {"tools_key": "schemas"}, r"data\.tools_key=schemas: no data file has this column"),
    "thinking": (
        sft,
        {"multiturn": {"enable": True, "enable_thinking_key": "t"}},
        r"data\.multiturn\.enable_thinking_",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_written_name_that_no_file_has_is_refused(case: str, paths: list[str]) -> None:
    check, data, message = REFUSED[case]
    with pytest.raises(WrongInput, match=message):
        check(paths, **data)


def test_names_that_a_file_has_or_that_nobody_wrote(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rl(paths)  # no file has the defaults
    rl(paths, image_key="pictures", video_key=None)  # only the validation file has it
    sft(paths, tools_key="functions")
    rl([paths[0], "hdfs://nowhere/val.parquet"], image_key="photos")  # which cannot be known
    monkeypatch.setattr(inputs, "overrides_given", lambda: {"data.image_key"})
    with pytest.raises(WrongInput, match=r"data\.image_key=images: no data file"):
        rl(paths)
