"""The rollout of a run as the trainer uses it: agent loops, or the worker group that generates by itself."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.experimental.agent_loop.rewards import scores_one_by_one
from verl.protocol import DataProto
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.reward import RewardFn
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.ppo.state import RunState
from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.timeline import RECORDED, Part, is_recording

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager


def start_agent_loops(
    config: DictConfig, actor: RayWorkerGroup, reward_model: RayWorkerGroup | None
) -> "AgentLoopManager":
    """Start the actors that run agent loops; they import while the models are built."""
    from verl.experimental.agent_loop import AgentLoopManager

    return AgentLoopManager(config, actor, reward_model)


class Rollouts:
    """Generates by agent loops or on the worker group, and knows which weights the engine has.

    The manager of agent loops of a fork need not have each method.
    """

    def __init__(
        self, run: RunConfig, state: RunState, group: RayWorkerGroup, manager: "AgentLoopManager | None"
    ) -> None:
        self._run = run
        self._state = state
        self._group = group
        self._manager = manager
        self._is_skipped = run.actor_rollout_ref.rollout.skip_rollout

    # ---- responses

    def skip(self, config: DictConfig) -> None:
        """Read and write the responses of an earlier run, if the configuration asks for it."""
        if self._is_skipped:
            RolloutSkip(config, self._manager or self._group).wrap_generate_sequences()

    def generate(self, requests: DataProto) -> DataProto:
        """Return the responses; the workers sync the weights first if the engine is behind."""
        if self._manager is not None and is_recording():
            requests.meta_info[RECORDED] = True
        output: DataProto = (self._manager or self._group).generate_sequences(requests)
        self._state.engine_version = self._state.weights_version
        return output

    def sync_weights(self) -> None:
        """Bring the weights of the engine up to date; do nothing when the versions agree."""
        state = self._state
        if state.engine_version == state.weights_version or self._is_skipped:
            return
        is_standalone = self._manager is not None and not self._run.actor_rollout_ref.hybrid_engine
        target = self._manager if is_standalone else self._group
        if target is not None and hasattr(target, "sync_weights"):  # a fork's worker class need not have it
            with phase("weight_sync", step=state.step):
                target.sync_weights(state.step)
            state.engine_version = state.weights_version

    # ---- scores

    def loops_score(self, reward_fn: RewardFn | None, has_reward_model: bool) -> bool:
        """Whether agent loops score their trajectories: with a rule that judges each by itself."""
        if self._manager is None or has_reward_model or self._is_skipped:
            return False  # a rollout that was kept may be scored by another rule
        return scores_one_by_one(reward_fn)

    def reward_model_need_not_wait(self, prompts: DataProto, reward_model: RayWorkerGroup | None) -> bool:
        """Whether a reward model with its own devices scores responses while agent loops generate the others.

        Images of later turns are not known before the whole batch is there.
        """
        return (
            self._manager is not None
            and self._run.reward_model.enable_resource_pool
            and hasattr(reward_model, "start_rm_score")  # the reward model of a recipe may be another kind of worker
            and not self._is_skipped
            and "multi_modal_inputs" not in prompts.non_tensor_batch
        )

    # ---- the actors that run agent loops

    def wait_until_ready(self) -> None:
        """Wait until the actors have started."""
        if self._manager is not None and hasattr(self._manager, "wait_until_ready"):
            with phase("init_agent_loops", step=0):
                self._manager.wait_until_ready()

    def flush_traces(self) -> None:
        """Wait until the actors have sent their traces."""
        if self._manager is not None and hasattr(self._manager, "flush_traces"):
            self._manager.flush_traces()

    def take_attempts(self) -> list[AttemptLine]:
        """Return the account of the attempts since the last call."""
        manager = self._manager
        return manager.take_attempts() if manager is not None and hasattr(manager, "take_attempts") else []

    def take_timeline(self) -> list[Part]:
        """Return what the actors have recorded since the last call."""
        manager = self._manager
        return manager.take_timeline() if manager is not None and hasattr(manager, "take_timeline") else []
