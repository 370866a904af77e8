"""The default: one call of the scorer per response."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.scoring import (
    Sample,
    call_scorer,
    gather_extras,
    given_scores,
    log_samples,
    place_scores,
    read_samples,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response."""

    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``; see ``AbstractRewardManager``."""
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = [call_scorer(lambda sample=sample: self._score(sample), sample) for sample in samples]
        log_samples(samples, scores, self.num_examine)
        reward = place_scores([score.value for score in scores], samples, data.batch["responses"])
        return {"reward_tensor": reward, "reward_extra_info": gather_extras(scores)} if return_dict else reward

    def _score(self, sample: Sample) -> Any:
        return self.compute_score(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
