"""Import path of the configuration of the actor in the established verl interface."""

from verl.workers.config.actor_critic import ActorConfig as ActorConfig
from verl.workers.config.actor_critic import FSDPActorConfig as FSDPActorConfig
from verl.workers.config.actor_critic import McoreActorConfig as McoreActorConfig
from verl.workers.config.actor_critic import PolicyLossConfig as PolicyLossConfig
