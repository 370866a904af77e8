"""Prompts from a file of questions, one to a line."""

from torch.utils.data import Dataset

import verl.utils.torch_functional as verl_F
from verl.utils.model import compute_position_id_with_mask


class QuestionLines(Dataset):
    """One row per line; what the scorer needs goes along in columns."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        files = [data_files] if isinstance(data_files, str) else data_files
        self.lines = [line for file in files for line in open(file).read().splitlines() if line]
        self.tokenizer = tokenizer
        self.config = config

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, item):
        chat = [{"role": "user", "content": self.lines[item]}]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        encoded = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        input_ids, attention_mask = verl_F.postprocess_data(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=self.config.max_prompt_length,
            pad_token_id=self.tokenizer.pad_token_id,
            left_pad=True,
            truncation=self.config.get("truncation", "error"),
        )
        position_ids = compute_position_id_with_mask(attention_mask)
        return {
            "input_ids": input_ids[0],
            "attention_mask": attention_mask[0],
            "position_ids": position_ids[0],
            "raw_prompt_ids": self.tokenizer.encode(prompt, add_special_tokens=False),
            "data_source": "letters",
            "reward_model": {"style": "rule", "ground_truth": self.lines[item]},
            "extra_info": {"index": item},
            "index": item,
        }
