"""The worker of the implicit process reward model, which is trained on outcomes and scores tokens."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.algos.aggregate import Metric, Sum
from verl.base_config import build_node
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.profiler.profile import DistProfiler
from verl.workers.engine import BaseEngine
from verl.workers.engine.passes import PassSpec, gather_rows, response_mask_of, temperature_of
from verl.workers.roles.base import EngineWorker
from verl.workers.roles.batching import per_rank_mini_batch, training_spec

from . import prime_core_algos as algos
from .config import PRIMERewardModelConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

REFERENCE = "rm_ref_log_prob"
"""The batch key of the log-probabilities (B, R) of the reward model's reference."""
ROW = "rm_row"
"""The batch key of a row's index (B,) in the batch of its rank."""
RIVALS = ("rm_rival", "rm_side", "rm_weight")
"""The batch keys of the fields of ``Rivals``, (B,) each."""


class PRIMERewardModelWorker(EngineWorker):
    """Trains the reward model and scores tokens by the log-ratio to its reference.

    Source: PRIME (arXiv:2502.01456), section 2.3.
    """

    def __init__(self, config: "PRIMERewardModelConfig | DictConfig") -> None:
        self.config: PRIMERewardModelConfig = build_node(config, PRIMERewardModelConfig)
        super().__init__(timeout_s=self.config.nccl_timeout)
        self.trained = self.config.as_trained()
        self.ref_engine: BaseEngine | None = None
        self.register_engine_mesh("reward", self.trained)
        self.use_profilers(reward_model=self.config.profiler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the reward model and its optimizer, and the frozen reference unless the policy is the reference."""
        config = self.config
        model_config = config.model.as_model_config()
        self.engine = self.build_engine("language_model", model_config, self.trained)
        if config.model.ref_type == "freeze":
            reference = model_config.changed({"path": config.model.ref_path})
            self.ref_engine = self.build_engine("language_model", reference, config.as_reference())
        dp_size = self.engine.get_data_parallel_size()
        key = "reward_model.mini_batch_size"
        self.rows_per_step = per_rank_mini_batch(key, config.mini_batch_size, config.rollout_n, dp_size)
        self.spec = training_spec(self.trained, dp_size)
        self.vocab_size: int = model_config.hf_config.get_text_config().vocab_size

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    @DistProfiler.annotate(color="brown", role="reward_model_score")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return ``rm_scores``, the log-ratio ``q`` and the reference's log-probabilities, (B, R) each."""
        metrics: dict[str, Any] = {}
        reference = self._reference(data, metrics)
        with self.accounted(metrics, "reward_model_infer", data), self.engine.eval_mode():
            log_probs = self.engine.infer_batch(data, self._spec(data))["log_probs"]
        return self._scored(data, log_probs - reference, reference, metrics)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    @DistProfiler.annotate(color="brown", role="reward_model_update", mini_batches=True)
    def update_rm(self, data: DataProto) -> DataProto:
        """Train on ``acc`` (B,); return the fields of ``compute_rm_score``, taken from the forward passes of training.

        A pair loss also reads the columns ``RIVALS``.
        """
        metrics: dict[str, Any] = {}
        reference = self._reference(data, metrics)
        batch = tensors_of(data)
        batch[REFERENCE] = reference
        batch[ROW] = torch.arange(len(data))
        log_ratio = torch.zeros_like(reference)
        model = self.config.model
        loss = partial(reward_model_loss, model.loss_type, model.beta_train, log_ratio)
        metrics |= self.update("reward_model", data, self.trained, loss, self._spec(data))
        return self._scored(data, log_ratio, reference, metrics)

    def _spec(self, data: DataProto) -> PassSpec:
        """Return the options of a pass at the temperature of the reference's log-probabilities.

        This is the temperature of the policy if the policy is the reference, else 1.

        Raises: ValueError if the policy is the reference and the batch lacks the temperature of its log-probabilities.
        """
        if self.ref_engine is None:
            return replace(self.spec, temperature=temperature_of(data))
        return self.spec

    def _reference(self, data: DataProto, metrics: dict[str, Any]) -> Tensor:
        """Return the log-probabilities (B, R) of the reference, zero outside the response mask."""
        batch = tensors_of(data)
        if REFERENCE in batch.keys():
            return batch[REFERENCE]
        largest = int(batch["input_ids"].max())
        if largest >= self.vocab_size:
            raise WrongInput(
                f"the batch holds token {largest}, but the reward model has {self.vocab_size} tokens: write in "
                "reward_model.model.path a model with the policy's tokenizer"
            )
        if self.ref_engine is None:
            return torch.where(response_mask_of(data).bool(), batch["old_log_probs"], 0.0)
        with self.accounted(metrics, "reward_model_ref", data, engine=self.ref_engine), self.ref_engine.eval_mode():
            return self.ref_engine.infer_batch(data, self.spec)["log_probs"]

    def _scored(self, data: DataProto, log_ratio: Tensor, reference: Tensor, metrics: dict[str, Any]) -> DataProto:
        config = self.config
        mask = response_mask_of(data)
        scores = algos.token_rewards(log_ratio, mask, config.model.beta_train, config.prime_granularity)
        if config.prime_norm == "batch_norm":
            shares = self.engine.shares
            largest = gather_rows(algos.largest_rest(scores).view(1), shares.size, shares.group).max()
            scores = scores / (largest + 1e-6)
        tensors = {"rm_scores": scores, "q": log_ratio, REFERENCE: reference}
        return DataProto.from_dict(tensors=tensors, meta_info={"metrics": metrics})


def reward_model_loss(
    loss_type: str, beta: float, collected: Tensor, model_output: Mapping[str, Tensor], data: DataProto
) -> tuple[list[Sum], dict[str, Metric]]:
    """Compute the loss of a micro-batch, and store its log-ratio in the matching rows of ``collected`` (B, R)."""
    batch = tensors_of(data)
    mask = batch["response_mask"]
    log_ratio = model_output["log_probs"] - batch[REFERENCE]
    collected[batch[ROW].cpu()] = log_ratio.detach().to(collected)
    if loss_type == "ce":
        losses = algos.compute_ce_loss(log_ratio, batch["acc"], mask, beta)
    else:
        losses = algos.compute_dpo_loss(log_ratio, mask, beta, algos.Rivals(*(batch[name] for name in RIVALS)))
    loss = Sum(losses.sum(), "sequence")
    return [loss], {"reward_model/dpo_loss": loss}
