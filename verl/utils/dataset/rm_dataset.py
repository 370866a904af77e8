"""Pairs of a chosen and a rejected response, for training reward models."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.files import ColumnCheck, as_file_list, localize, read_parquet


class RMDataset(Dataset):
    """Rows of ``prompt``, ``chosen`` and ``rejected`` text.

    An item holds ``input_ids`` and ``attention_mask``, each (2, max_length), chosen response first, right-padded and
    truncated on the right.

    Raises: DataError naming file, row and column.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_length: int = 1024,
        add_eos: bool = True,
        cache_dir: str = "~/.cache/verl/rm",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.add_eos = add_eos
        self.rows: list[tuple[str, str, str]] = []
        for path in localize(as_file_list(parquet_files), cache_dir):
            for check in ColumnCheck.over(path, read_parquet(path)):
                columns = (check.texts(key, key) for key in (prompt_key, chosen_key, rejected_key))
                self.rows += zip(*columns, strict=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        prompt, *responses = self.rows[item]
        ids, masks = zip(*(self._encode(prompt, response) for response in responses), strict=True)
        return {"input_ids": torch.stack(ids), "attention_mask": torch.stack(masks)}

    def _encode(self, prompt: str, response: str) -> tuple[Tensor, Tensor]:
        ids = self.tokenizer(prompt + response, add_special_tokens=False)["input_ids"]
        if self.add_eos:
            ids = [*ids, self.tokenizer.eos_token_id]
        ids = ids[: self.max_length]
        padded = torch.full((self.max_length,), self.tokenizer.pad_token_id, dtype=torch.long)
        padded[: len(ids)] = torch.tensor(ids)
        return padded, (torch.arange(self.max_length) < len(ids)).long()
