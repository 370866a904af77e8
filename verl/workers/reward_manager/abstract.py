"""What every reward manager does."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from verl.protocol import DataProto

RawScorer = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Scores a batch of prompts and responses.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: how many samples of each data source are logged per batch.
        compute_score: the scorer; what it is called with is up to the manager.
        reward_fn_key: column that holds the data source.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ValueError(
                f"reward_model.reward_kwargs holds {sorted(kwargs)}, which {type(self).__name__} does not take"
            )
        if compute_score is None:
            from verl.utils.reward_score import default_compute_score

            compute_score = default_compute_score
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key

    @abstractmethod
    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``.

        Returns: scores (B, R), zero but at the last valid token of each response; or a dict of them as
        ``reward_tensor``, with what else the scorer said as ``reward_extra_info``, a dict of lists of length B.
        """

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as this manager passes them, by which the signature of a scorer is checked."""
        return (), {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}
