"""The FSDP workers of the established verl interface: the classes of ``verl.workers.roles``, for every strategy."""

from verl.utils.fsdp_utils import get_sharding_strategy
from verl.utils.model import get_vl_model_vision_tower
from verl.workers.engine.fsdp.layout import create_device_mesh
from verl.workers.roles import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker, RewardModelWorker

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "create_device_mesh",
    "get_sharding_strategy",
    "get_vl_model_vision_tower",
]
