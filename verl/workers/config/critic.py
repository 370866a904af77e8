"""Import path of the configuration of the critic in the established verl interface."""

from verl.workers.config.actor_critic import CriticConfig as CriticConfig
from verl.workers.config.actor_critic import FSDPCriticConfig as FSDPCriticConfig
from verl.workers.config.actor_critic import FSDPCriticModelCfg as FSDPCriticModelCfg
from verl.workers.config.actor_critic import McoreCriticConfig as McoreCriticConfig
