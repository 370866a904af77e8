"""The rollout of a run as the trainer uses it: agent loops, or the worker group that generates by itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from verl.experimental.agent_loop.rewards import scores_one_by_one
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.base.manager import adapted
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import sampling
from verl.trainer.ppo.phases import check_rollout
from verl.trainer.ppo.reward import PendingReward, RewardFn
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.ppo.sampling import Sampled
from verl.trainer.ppo.state import Metrics, RunState, Timing, timed
from verl.trainer.ppo.validation import complete_requests, repeat_prompts
from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.timeline import RECORDED, Part, is_recording

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager

TakePrompts = Callable[[DataProto], DataProto]
"""Moves the columns that the rollout reads out of a batch."""


def start_agent_loops(
    config: DictConfig, actor: RayWorkerGroup, reward_model: RayWorkerGroup | None
) -> "AgentLoopManager":
    """Start the actors that run agent loops; they import while the models are built."""
    from verl.experimental.agent_loop import AgentLoopManager

    return AgentLoopManager(config, actor, reward_model)


class Rollouts:
    """Samples responses by agent loops or on the worker group, and knows which weights the engine has."""

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        group: RayWorkerGroup,
        manager: "AgentLoopManager | None",
        take_prompts: TakePrompts,
        reward_model: RayWorkerGroup | None = None,
        scores_early: bool = True,
        log_attempts: Callable[[Sequence[AttemptLine]], None] | None = None,
    ) -> None:
        """Sample with the workers of ``group``, or with the agent loops of ``manager``.

        Args: ``reward_model`` scores the responses, with ``scores_early`` while others are generated;
            ``log_attempts`` takes the account of the attempts of agent loops.
        """
        self._run = run
        self._state = state
        self._group = group
        self._manager = manager
        self._source = adapted(manager or group)
        self._take_prompts = take_prompts
        self._reward_model = reward_model
        self._scores_early = scores_early
        self._log_attempts = log_attempts
        self._is_skipped = run.actor_rollout_ref.rollout.skip_rollout

    # ---- the responses of a training step

    def sample(self, batch: DataProto, reward_fn: RewardFn | None, metrics: Metrics, timing: Timing) -> Sampled:
        """Sample ``rollout.n`` responses per prompt; return the prompts, the responses and the seeds of these.

        The columns that the rollout reads move from ``batch`` to the prompts.
        """
        prompts, requests, seeds = self.requests(batch, reward_fn, metrics)
        with timed("gen", timing, self._state.step):
            output = self.generate(requests)
        self.receive(requests, output, metrics, timing)
        return prompts, output, seeds

    def requests(self, batch: DataProto, reward_fn: RewardFn | None, metrics: Metrics) -> Sampled:
        """Return the prompts, the requests for their responses, and the seeds of these."""
        prompts = self._take_prompts(batch)
        loops_score = self.loops_score(reward_fn)
        early_scores = self._reward_model_need_not_wait(prompts)
        return sampling.requests_for(prompts, batch, self._run, self._state, loops_score, early_scores, metrics)

    def receive(self, requests: DataProto, output: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Check the responses of a rollout, and move their times and metrics to those of the step."""
        self._check(requests, output)
        sampling.take_metrics(output, metrics, timing)

    def greedy_baseline(
        self, batch: DataProto, prompts: DataProto, reward: PendingReward, metrics: Metrics, timing: Timing
    ) -> torch.Tensor:
        """Return the score of one greedy response per prompt, (num_prompts,), as ReMax subtracts it."""
        requests = sampling.greedy_requests(prompts, self._state)
        with timed("gen_max", timing, self._state.step):
            greedy = batch.repeat(repeat_times=1).union(self._generate_padded(requests))
            return sampling.score_greedy(greedy, reward, metrics)

    # ---- responses

    def validate(self, prompts: DataProto, first_prompt: int, reward_fn: RewardFn | None) -> DataProto:
        """Return ``val_kwargs.n`` responses to each prompt; ``first_prompt`` prompts of the set came before."""
        options = self._run.actor_rollout_ref.rollout.val_kwargs
        state = self._state
        batch, seeds = repeat_prompts(prompts, options.n, state.seed, state.step, first_prompt)
        requests = self._take_prompts(batch)
        complete_requests(requests, prompts, seeds, options.do_sample, state.step, self.loops_score(reward_fn))
        batch = batch.union(self._generate_padded(requests))
        batch.meta_info["validate"] = True
        return batch

    def generate(self, requests: DataProto) -> DataProto:
        """Return the responses; the workers sync the weights first if the engine is behind."""
        if self._manager is not None and is_recording():
            requests.meta_info[RECORDED] = True
        try:
            output: DataProto = self._source.generate_sequences(requests)
        finally:  # what failed is in the account too
            if self._log_attempts is not None:
                self._log_attempts(self._source.take_attempts())
        self._state.engine_version = self._state.weights_version
        return output

    def _generate_padded(self, requests: DataProto) -> DataProto:
        """Generate for any number of requests, and drop the timers and metrics of the rollout."""
        padded, pad_size = pad_dataproto_to_divisor(requests, self._group.world_size)
        output = unpad_dataproto(self.generate(padded), pad_size=pad_size)
        self._check(requests, output)
        return sampling.drop_metrics(output)

    def _check(self, requests: DataProto, output: DataProto) -> None:
        """Check a rollout where its columns are; agent loops write masks and prompts themselves."""
        single_turn = not self._run.actor_rollout_ref.rollout.serves
        check_rollout(requests, output, self._state.step, single_turn, self._group)

    def skip(self, config: DictConfig) -> None:
        """Read and write the responses of an earlier run, if the configuration asks for it."""
        if self._is_skipped:
            RolloutSkip(config, self._source).wrap_generate_sequences()

    # ---- weights

    def sync_weights(self) -> None:
        """Bring the weights of the engine up to date; do nothing when the versions agree."""
        state = self._state
        if state.engine_version == state.weights_version or self._is_skipped:
            return
        is_standalone = self._manager is not None and not self._run.actor_rollout_ref.hybrid_engine
        with phase("weight_sync", step=state.step):
            (self._source if is_standalone else adapted(self._group)).sync_weights(state.step)
        state.engine_version = state.weights_version

    # ---- scores

    def loops_score(self, reward_fn: RewardFn | None) -> bool:
        """Whether agent loops score their trajectories: with a rule that judges each by itself."""
        if self._manager is None or self._reward_model is not None or self._is_skipped:
            return False  # a rollout that was kept may be scored by another rule
        return scores_one_by_one(reward_fn)

    def _reward_model_need_not_wait(self, prompts: DataProto) -> bool:
        """Whether a reward model with its own devices scores responses while agent loops generate the others.

        Images of later turns are not known before the whole batch is there.
        """
        return (
            self._manager is not None
            and self._reward_model is not None
            and self._scores_early
            and self._run.reward_model.enable_resource_pool
            and not self._is_skipped
            and "multi_modal_inputs" not in prompts.non_tensor_batch
        )

    # ---- the actors that run agent loops

    def wait_until_ready(self) -> None:
        """Wait until the actors have started."""
        with phase("init_agent_loops", step=0):
            self._source.wait_until_ready()

    def flush_traces(self) -> None:
        """Wait until the actors have sent their traces."""
        self._source.flush_traces()

    def take_timeline(self) -> list[Part]:
        """Return the spans that the actors have recorded since the last call."""
        return self._source.take_timeline()
