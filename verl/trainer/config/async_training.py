"""How far generation may run ahead of training: the node ``async_training``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, TypedDict

from verl.base_config import BaseConfig, setting

SYNC = "sync"
ONE_STEP_OFF = "one_step_off"
FULLY_ASYNC = "fully_async"
COLOCATE_ASYNC = "colocate_async"
WAIT = "wait"
DROP = "drop"
MODES = (SYNC, ONE_STEP_OFF, COLOCATE_ASYNC, FULLY_ASYNC)


class Decided(TypedDict, total=False):
    """Keys of ``AsyncTrainingConfig`` that a mode decides."""

    staleness_threshold: float
    trigger_parameter_sync_step: int
    partial_rollout: bool
    max_off_policy_threshold: int | None
    off_policy_strategy: str


DECIDED: Mapping[str, Decided] = MappingProxyType(
    {
        ONE_STEP_OFF: Decided(
            staleness_threshold=1.0,
            trigger_parameter_sync_step=1,
            partial_rollout=False,
            max_off_policy_threshold=1,
            off_policy_strategy=WAIT,
        )
    }
)
"""The keys that a mode decides, with their values."""


@dataclass
class AsyncTrainingConfig(BaseConfig):
    """When prompts are sent, when new weights are published, and how old a token may be.

    A *version* of the weights is what one publication gives to the servers; the first has number 0.
    """

    _is_closed: ClassVar[bool] = True

    mode: str = setting(SYNC, "how generation and training follow each other", one_of=MODES)
    staleness_threshold: float = setting(
        0.1, "prompts sent ahead for the next version, as a share of those of one version", at_least=0
    )
    trigger_parameter_sync_step: int = setting(4, "updates between two publications of weights", at_least=1)
    require_batches: int = setting(1, "mini-batches of one update", at_least=1)
    partial_rollout: bool = setting(True, "let unfinished responses go on under new weights; false: wait for them")
    use_rollout_log_probs: bool = setting(True, "take the rollout's log-probabilities as the old ones of the loss")
    max_off_policy_threshold: int | None = setting(
        None, "most versions between the sampling of a token and its update; null: no limit", at_least=0
    )
    off_policy_strategy: str = setting(
        WAIT, "whether updates wait for work that would become too old, or drop it", one_of=(WAIT, DROP)
    )
    replay: str | None = setting(None, "ledger of a run whose batches are trained again; nothing is generated")

    @property
    def is_async(self) -> bool:
        """Whether generation runs ahead of training."""
        return self.mode != SYNC

    @property
    def takes_turns(self) -> bool:
        """Whether it does so on the same devices, in turns."""
        return self.mode == COLOCATE_ASYNC

    @property
    def gathers_draws(self) -> bool:
        """Whether an update takes the prompts of several draws."""
        return self.mode in (COLOCATE_ASYNC, FULLY_ASYNC)

    @property
    def decided(self) -> "AsyncTrainingConfig":
        """These settings with the values that the mode decides."""
        return replace(self, **DECIDED.get(self.mode, Decided()))
