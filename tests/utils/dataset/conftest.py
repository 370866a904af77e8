"""Data files and the tokenizer that the data set tests read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from examples.tiny_model import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    return byte_tokenizer()


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes rows into a parquet file and returns its path."""

    def write(rows: list[dict[str, Any]], name: str = "train.parquet") -> str:
        path = tmp_path / name
        keys = dict.fromkeys(key for row in rows for key in row)
        rows = [{key: row.get(key) for key in keys} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)

    return write


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a row, with columns replaced, or left out where they are None."""

    def make(content: str = "1+1=?", **columns: Any) -> dict[str, Any]:
        made = {
            "prompt": [{"role": "user", "content": content}],
            "data_source": "openai/gsm8k",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7, "split": "train"},
            **columns,
        }
        return {key: value for key, value in made.items() if value is not None}

    return make
