"""Pairs of prompt and response for supervised training."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.files import ColumnCheck, as_file_list, is_text, localize, read_parquet
from verl.utils.dataset.multiturn_sft_dataset import cut_sequence, pad_right


def text_column(path: str, table: pa.Table, name: str, key: str, dict_keys: Iterable[str] | None = None) -> list[str]:
    """Return a column of strings, or what lies at ``dict_keys`` in a column of dicts.

    Raises: DataError naming file, row and column.
    """
    texts: list[str] = []
    for check in ColumnCheck.over(path, table):
        values, label = check.column(name, key), name
        for field in dict_keys or ():
            if not pa.types.is_struct(values.type) or field not in [f.name for f in values.type]:
                check.fail(label, 0, f"has no field {field!r}, it is {values.type}", f"{key} with its dict keys")
            values, label = pc.struct_field(values, field), f"{label}.{field}"
        if not is_text(values.type):
            check.fail(label, 0, f"must be a string, got {values.type}", key)
        check.refuse(label, pc.is_null(values), "is null, must be a string", key)
        texts += values.to_pylist()
    return texts


class SFTDataset(Dataset):
    """Single-turn rows: two columns of text.

    An item holds ``input_ids, attention_mask, position_ids, loss_mask``, each (max_length,) and padded on the right.
    ``loss_mask`` marks the positions that predict the response and its end: the last of the prompt, and those of the
    response but the last.

    Raises: DataError naming file, row and column.
    """

    def __init__(
        self, parquet_files: str | list[str], tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = config.get("max_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs") or {})
        prompt_key, response_key = config.get("prompt_key", "prompt"), config.get("response_key", "response")
        self.data_files = localize(as_file_list(parquet_files), use_shm=config.get("use_shm", False))
        self.prompts: list[str] = []
        self.responses: list[str] = []
        self._places: list[tuple[str, int]] = []
        for path in self.data_files:
            table = read_parquet(path)
            self.prompts += text_column(path, table, prompt_key, "data.prompt_key", config.get("prompt_dict_keys"))
            self.responses += text_column(
                path, table, response_key, "data.response_key", config.get("response_dict_keys")
            )
            self._places += [(path, row) for row in range(table.num_rows)]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        message = {"role": "user", "content": self.prompts[item]}
        prompt = self.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=False, **self.apply_chat_template_kwargs
        )
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response = self.responses[item] + self.tokenizer.eos_token
        response_ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        mask = [0] * (len(prompt_ids) - 1) + [1] * len(response_ids) + [0]
        path, row = self._places[item]
        where = f"{path}, row {row}"
        ids = cut_sequence(prompt_ids + response_ids, self.max_length, self.truncation, where)
        mask = cut_sequence(mask, self.max_length, self.truncation, where)
        mask[-1] = 0  # what was cut off behind it is not there to be predicted
        return pad_right(torch.tensor(ids), torch.tensor(mask), self.max_length, int(self.tokenizer.pad_token_id))
