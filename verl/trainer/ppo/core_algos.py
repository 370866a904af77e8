"""Import path of the established verl interface for the algorithms; the code is in ``verl.algos``."""

from verl.algos.advantage import *  # noqa: F403
from verl.algos.aggregate import agg_loss as agg_loss
from verl.algos.kl import *  # noqa: F403
from verl.algos.policy_loss import *  # noqa: F403
from verl.algos.value_loss import *  # noqa: F403
from verl.utils.import_utils import forward_assignments

forward_assignments(
    __name__,
    {"ADV_ESTIMATOR_REGISTRY": "verl.algos.advantage", "POLICY_LOSS_REGISTRY": "verl.algos.policy_loss"},
)
