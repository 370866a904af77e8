"""Generation engines: vLLM and transformers' own."""

from typing import TYPE_CHECKING, Any

from verl.base_config import ConfigError
from verl.errors import WrongInput
from verl.utils.device import get_device_name
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.hf_rollout import HFRollout, NaiveRollout
from verl.workers.rollout.registry import get_rollout_class

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

__all__ = ["BaseRollout", "HFRollout", "NaiveRollout", "begin_rollout", "build_rollout", "get_rollout_class"]


def build_rollout(config: "RolloutConfig", model_config: "HFModelConfig", engine: Any = None) -> BaseRollout:
    """Start the rollout that ``config.name`` and ``config.mode`` name; without a training engine it loads a checkpoint.

    Raises: ValueError for an unknown rollout, and for a rollout that waits for weights that no engine sends.
    """
    rollout = begin_rollout(config, model_config, has_trainer=engine is not None)
    rollout.wait_until_started()
    return rollout


def begin_rollout(config: "RolloutConfig", model_config: "HFModelConfig", has_trainer: bool) -> BaseRollout:
    """Begin to start a rollout; see ``build_rollout``. Call ``wait_until_started`` before anything else of it."""
    if not has_trainer and config.load_format == "dummy":
        raise WrongInput(
            "actor_rollout_ref.rollout.load_format=dummy waits for the weights of a trainer, and this worker has none: "
            "write load_format=auto"
        )
    engine = get_rollout_class(config.name, config.mode)
    if refused := [*config.demand(get_device_name()).refused_by(engine.__name__, engine.facts)]:
        raise ConfigError(refused)
    return engine.begin(config, model_config)
