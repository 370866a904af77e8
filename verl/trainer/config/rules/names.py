"""Names that a registry must know."""

from collections.abc import Iterator

from verl.algos.names import ADV_ESTIMATORS, POLICY_LOSSES
from verl.base_config import Violation
from verl.trainer.config.run_config import RunConfig
from verl.utils import envs
from verl.utils.structured import nearest
from verl.workers.rewards.signature import SCORER_CALLS


def name_rules(run: RunConfig) -> Iterator[Violation]:
    """Yield unregistered estimators, losses and managers, unless a module of the user may register them."""
    shared = run.actor_rollout_ref
    if envs.read("VERL_USE_EXTERNAL_MODULES") or shared.model.external_lib:
        return
    for key, name, known in (
        ("algorithm.adv_estimator", run.algorithm.adv_estimator, ADV_ESTIMATORS),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", shared.actor.policy_loss.loss_mode, POLICY_LOSSES),
        ("reward_model.reward_manager", run.reward_model.reward_manager, tuple(SCORER_CALLS)),
    ):
        if name not in known:
            similar = ", ".join(nearest(name, known)) or ", ".join(known)
            expected = (
                f"is not registered; the nearest: {similar}. A name that you add needs a module that registers it in "
                "VERL_USE_EXTERNAL_MODULES or actor_rollout_ref.model.external_lib"
            )
            yield Violation(key, name, expected)
