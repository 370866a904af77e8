"""Import path of the established verl interface for the environment of Ray processes (``verl.trainer.run.launch``)."""

from verl.trainer.run.launch import runtime_env
from verl.trainer.run.variables import RUNTIME_ENV_VARS
from verl.utils.device import get_device_name
from verl.utils.json_types import Json

PPO_RAY_RUNTIME_ENV = {"env_vars": dict(RUNTIME_ENV_VARS)}


def get_ppo_ray_runtime_env() -> dict[str, Json]:
    """Return the runtime environment for ``ray.init``, without variables that this process already has."""
    return runtime_env(get_device_name(), {})
