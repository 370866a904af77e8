"""The policy under training, its generation engine and the reference policy: the node of the shared workers."""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig, setting
from verl.workers.config.actor import ActorConfig
from verl.workers.config.engine import NCCL_TIMEOUT_S
from verl.workers.config.model import HFModelConfig
from verl.workers.config.ref import FSDPRefConfig, RefConfig
from verl.workers.config.rollout import RolloutConfig


@dataclass
class ActorRolloutRefConfig(BaseConfig):
    """The policy, its rollout and its reference, which share processes and devices."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=FSDPRefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    model: HFModelConfig = field(default_factory=HFModelConfig)
    hybrid_engine: bool = setting(
        True, "actor and rollout share their devices", one_of=(True,), hint="actor and rollout share their devices"
    )
    nccl_timeout: float = setting(NCCL_TIMEOUT_S, "seconds that a collective may take", above=0)

    @property
    def reference_is_in_actor(self) -> bool:
        """Whether the actor's workers hold the reference: the base of its adapters, or a model for the full KL."""
        return self.model.lora_rank > 0 or self.actor.uses_full_kl
