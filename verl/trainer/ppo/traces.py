"""The trajectories of a batch as traces, where ``rollout.trace.backend`` names where they go."""

import logging
from typing import TYPE_CHECKING, Any

from verl.utils.observe.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def start_traces(config: Any) -> None:
    """Open the backend that the configuration names."""
    trace, trainer = config.actor_rollout_ref.rollout.trace, config.trainer
    RolloutTraceConfig.init(trainer.project_name, trainer.experiment_name, trace.backend, trace.token2text)


def trace_batch(trainer: "RayPPOTrainer", batch: "DataProto", scores: Any, validate: bool = False) -> None:
    """Make a trace of every response of a scored batch, (B,) scores.

    A backend that fails does not end the run: the rest of the batch is left out, with a warning.
    """
    if RolloutTraceConfig.get_backend() is None:
        return
    try:
        _trace_rows(trainer, batch, scores, validate)
    except Exception as error:  # each library raises what it likes
        logger.warning(
            "rollout.trace.backend=%s has not taken all traces of step %d, and the run goes on: %s: %s",
            *(RolloutTraceConfig.get_backend(), trainer.global_steps, type(error).__name__, error),
        )


def _trace_rows(trainer: "RayPPOTrainer", batch: "DataProto", scores: Any, validate: bool) -> None:
    times: dict[Any, int] = {}
    for row, (uid, score) in enumerate(zip(batch.non_tensor_batch["uid"], scores.tolist(), strict=True)):
        sample = times.get(uid, 0)  # which of the responses to its prompt
        times[uid] = sample + 1
        with rollout_trace_attr(sample_index=uid, step=trainer.global_steps, rollout_n=sample, validate=validate):
            _Row(trainer, batch, row).trajectory(**_prompt(trainer, batch, row), score=score)


def _prompt(trainer: "RayPPOTrainer", batch: "DataProto", row: int) -> dict[str, Any]:
    width = batch.batch["prompts"].shape[-1]
    ids = batch.batch["prompts"][row][batch.batch["attention_mask"][row, :width].bool()].tolist()
    text = {"prompt_text": trainer.tokenizer.decode(ids)} if RolloutTraceConfig.enable_token2text() else {}
    return {"prompt_ids": ids, **text}


class _Row:
    """One response of a batch."""

    def __init__(self, trainer: "RayPPOTrainer", batch: "DataProto", row: int) -> None:
        self._trainer, self._batch, self._row = trainer, batch, row

    @rollout_trace_op
    def trajectory(self, prompt_ids: list[int], score: float, prompt_text: str | None = None) -> dict[str, Any]:
        """Return what the model has answered, and its score."""
        width = self._batch.batch["responses"].shape[-1]
        mask = self._batch.batch["attention_mask"][self._row, -width:].bool()
        ids = self._batch.batch["responses"][self._row][mask].tolist()
        text = {"response_text": self._trainer.tokenizer.decode(ids)} if RolloutTraceConfig.enable_token2text() else {}
        return {"response_ids": ids, "score": score, **text}
