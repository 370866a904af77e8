"""The scorer, and a reward manager that is registered when this file is loaded."""

from collections import defaultdict

import torch

from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return whether enough of the first characters are lower-case letters; never for every third prompt."""
    letters = sum(character.islower() for character in solution_str[:16])
    right = letters >= 2 and extra_info["index"] % 3 != 0
    return {"score": float(right), "acc": right}


@register("letters")
class LettersRewardManager(AbstractRewardManager):
    """Scores response by response."""

    def __init__(
        self,
        tokenizer,
        num_examine,
        compute_score=None,
        reward_fn_key="data_source",
        max_resp_len=None,
        overlong_buffer_cfg=None,
    ):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg

    def __call__(self, data: DataProto, return_dict: bool = False):
        """Put the score of each response at its last token."""
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extras = defaultdict(list)
        for row in range(len(data)):
            item = data[row]
            prompt_length = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            result = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info"),
            )
            for key, value in result.items():
                extras[key].append(value)
            rewards[row, length - 1] = result["score"]
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards
