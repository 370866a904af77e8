"""Pairs of prompt and response for supervised training."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.config import DataConfig, Node
from verl.utils.dataset.files import ColumnCheck, as_file_list, localize, read_parquet
from verl.utils.dataset.multiturn_sft_dataset import cut_sequence, pad_right


class SFTDataset(Dataset):
    """Single-turn rows: one text column for the prompt and one for the response.

    An item holds ``input_ids, attention_mask, position_ids, loss_mask``, each (max_length,), right-padded.
    ``loss_mask`` marks the positions that predict the response and its end: from the last prompt token to the second
    to last response token.

    Raises: DataError naming file, row and column.
    """

    def __init__(self, parquet_files: str | list[str], tokenizer: PreTrainedTokenizerBase, config: Node) -> None:
        settings = DataConfig.of_data_set(config)
        self.tokenizer = tokenizer
        self.max_length = settings.max_length
        self.truncation = settings.truncation
        self.apply_chat_template_kwargs = dict(settings.apply_chat_template_kwargs)
        self.data_files = localize(as_file_list(parquet_files), use_shm=settings.use_shm)
        self.prompts: list[str] = []
        self.responses: list[str] = []
        self._places: list[tuple[str, int]] = []
        for path in self.data_files:
            table = read_parquet(path)
            for check in ColumnCheck.over(path, table):
                self.prompts += check.texts(settings.prompt_key, "data.prompt_key", settings.prompt_dict_keys or ())
                self.responses += check.texts(
                    settings.response_key, "data.response_key", settings.response_dict_keys or ()
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
        mask[-1] = 0  # the last position has no next token to predict after truncation
        return pad_right(torch.tensor(ids), torch.tensor(mask), self.max_length, int(self.tokenizer.pad_token_id))
