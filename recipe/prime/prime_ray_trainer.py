"""The training loop with a reward model that is trained too, and a filter of prompts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl.base_config import build_node
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.loaders import Rows
from verl.trainer.ppo.ray_trainer import Metrics, RayPPOTrainer, Timing
from verl.trainer.ppo.segments import without_segments
from verl.utils.metric import reduce_metrics

from . import prime_core_algos as algos
from .config import PRIMEAlgoConfig, PRIMEDataConfig, PRIMERewardModelConfig
from .prime_fsdp_workers import REFERENCE, RIVALS


class RayPRIMETrainer(RayPPOTrainer):
    """RLOO on two rewards: the outcome, and token rewards of a model that is trained to predict the outcome.

    ``collect`` also filters the prompts; ``shape`` trains the reward model, and computes advantages from both rewards.

    Source: PRIME (arXiv:2502.01456), algorithm 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_rm = False  # the reward model runs in ``shape``; ``score`` only calls the reward function
        self._read_nodes()
        train = self.data_node.train_batch_size
        if self.reward_node is not None and train % self.reward_node.mini_batch_size:
            size = self.reward_node.mini_batch_size
            raise WrongInput(f"reward_model.mini_batch_size={size}: must divide data.train_batch_size={train}")

    def _read_nodes(self) -> None:
        self.data_node = build_node(self.config.data, PRIMEDataConfig)
        self.algorithm_node = build_node(self.config.algorithm, PRIMEAlgoConfig)
        self.reward_node: PRIMERewardModelConfig | None = None
        if OmegaConf.select(self.config, "reward_model.enable"):
            self.reward_node = build_node(self.config.reward_model, PRIMERewardModelConfig)

    # ---- the filter

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Draw and score ``oversample_factor`` times as many prompts as a step trains on; keep the preferred ones."""
        batch = super().collect(rows, metrics, timing)
        with self._timed("verify", timing):
            self._add_scores(batch, metrics)
        # Undo the balancing over ranks, so that the choice of prompts does not depend on it.
        batch.reorder(torch.tensor(self.state.row_order))
        outcome = outcome_of(batch)
        tensors_of(batch)["acc"] = outcome
        metrics["acc"] = float(outcome.double().mean())
        return self._arrange(self.filter_and_downsample(outcome.tolist(), batch), metrics)

    def score(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Score the responses by the reward function, which verifies their answers."""
        with self._timed("verify", timing):
            self.state.pending_reward = self._new_reward().start(batch, metrics)
        return batch

    def filter_and_downsample(self, scores: Sequence[float], batch: DataProto) -> DataProto:
        """Keep one in ``oversample_factor`` prompts, preferably of medium accuracy and without a truncated response.

        Args: ``scores`` are the (B,) outcomes; the responses to a prompt are in neighbouring rows.
        """
        data = self.data_node
        num_samples = self.run_config.actor_rollout_ref.rollout.n
        tensors = tensors_of(batch)
        width = tensors["responses"].shape[1]
        lengths = tensors["attention_mask"][:, -width:].sum(-1).view(-1, num_samples)
        choice = algos.PromptFilter(
            data.accuracy_lower_bound if data.filter_accuracy else None,
            data.accuracy_upper_bound if data.filter_accuracy else None,
            width if data.filter_truncate else None,
        )
        preferred = choice.preferred(torch.tensor(scores).view(-1, num_samples), lengths)
        kept = algos.preferred_first(preferred, int(len(preferred) // data.oversample_factor))
        rows = kept.unsqueeze(-1) * num_samples + torch.arange(num_samples)
        return batch.select_idxs(rows.flatten())

    # ---- the reward model and the advantages

    def split_segments(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Keep only the last segment of each trajectory."""
        return without_segments(batch, "PRIME's reward model judges whole responses")

    def infer(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute the model outputs of the step; also the old log-probabilities if the policy is the reference."""
        batch = super().infer(batch, metrics, timing)
        reads_policy = self.reward_node is not None and self.reward_node.model.ref_type == "policy"
        if reads_policy and "old_log_probs" not in tensors_of(batch).keys():
            with self._timed("old_log_prob", timing):
                batch = self._add_old_log_probs(batch, metrics)
        return batch

    def shape(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Train the reward model and score the tokens, then compute advantages and returns from both rewards."""
        if self.reward_node is not None:
            with self._timed("reward_model", timing):
                output, found = self.compute_reward(batch, self.run_config.actor_rollout_ref.rollout.n)
                tensors_of(batch)["rm_scores"] = tensors_of(output)["rm_scores"]
                metrics.update(found)
        return super().shape(batch, metrics, timing)

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Add the columns of advantages and returns, the sum over outcome and reward model."""
        tensors = tensors_of(batch)
        tensors["advantages"], tensors["returns"] = algos.compute_rloo_advantage_return(
            self._streams(batch), tensors["response_mask"], batch.non_tensor_batch["uid"]
        )
        return batch

    def _streams(self, batch: DataProto) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the weighted rewards of outcome and reward model, each with a mask of its tokens, all (B, R)."""
        node = self.algorithm_node
        tensors = tensors_of(batch)
        mask = tensors["response_mask"]
        streams = [(node.reward_gt_coef * algos.at_last(tensors["acc"], mask), algos.last_tokens(mask))]
        if "rm_scores" in tensors.keys():
            streams.append((node.reward_dpo_coef * tensors["rm_scores"], mask))
        return streams

    def compute_reward(self, batch: DataProto, n_samples: int) -> tuple[DataProto, Metrics]:
        """Score the tokens and train the reward model, in the configured order; return the scores and metrics.

        Args: ``n_samples`` is the number of responses to a prompt.
        """
        assert self.reward_node is not None and self.rm_wg is not None
        model = self.reward_node.model
        metrics: Metrics = {}
        request = batch.select(
            batch_keys=[name for name in _READ if name in tensors_of(batch).keys()],
            non_tensor_batch_keys=[name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch],
        )
        outcome = algos.checked_outcome(tensors_of(batch)["acc"], model.loss_type)

        def call(method: Any) -> DataProto:
            output: DataProto = method(request)
            metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
            tensors_of(request)[REFERENCE] = tensors_of(output)[REFERENCE]
            return output

        first = call(self.rm_wg.compute_rm_score) if model.update in ("none", "reverse") else None
        if model.update == "none":
            assert first is not None
            return first, metrics | self._quality(first, batch, "")
        if model.loss_type != "ce":
            first = first or call(self.rm_wg.compute_rm_score)
            reward = model.beta_train * algos.summed(tensors_of(first)["q"], tensors_of(batch)["response_mask"])
            rivals = algos.find_rivals(reward, outcome, compared(batch), model.loss_type)
            for name, values in zip(RIVALS, (rivals.reward, rivals.side, rivals.weight), strict=True):
                tensors_of(request)[name] = values
        update = call(self.rm_wg.update_rm)
        if model.update == "before":
            metrics |= self._quality(update, batch, "_before")
            update = call(self.rm_wg.compute_rm_score)
        elif model.update == "reverse" and first is not None:
            update = first
        return update, metrics | self._quality(update, batch, "")

    def _quality(self, output: DataProto, batch: DataProto, suffix: str) -> Metrics:
        """Return metrics of how well the reward model tells right from wrong responses, and its mean reward."""
        found = tensors_of(output)
        mask = tensors_of(batch)["response_mask"]
        outcome = tensors_of(batch)["acc"]
        reward = algos.summed(found["q"], mask)
        pairs = algos.compute_dpo_accuracy(reward, outcome, compared(batch))
        quality = {"dpo_acc": pairs, "dpo_acc_abs": algos.compute_dpo_abs_accuracy(reward, outcome)}
        metrics = {f"reward_model/{name}{suffix}": value for name, value in quality.items()}
        if not suffix:
            metrics["reward_model/reward"] = float(found["rm_scores"].double().sum(-1).mean())
            metrics["reward_model/raw_reward"] = float(reward.double().mean())
        return metrics

    # ---- checkpoints

    def trained_groups(self) -> dict[str, RayWorkerGroup]:
        """Return the worker groups that train, which include the reward model."""
        groups = super().trained_groups()
        return groups if self.rm_wg is None else groups | {"reward": self.rm_wg}


_READ = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "old_log_probs", "acc")
"""The batch keys that the reward model reads."""


def compared(batch: DataProto) -> np.ndarray:
    """Return the prompt of each response, (B,); a response without tokens has a prompt of its own, so no rivals."""
    has_token = tensors_of(batch)["response_mask"].any(-1).tolist()
    uids = batch.non_tensor_batch["uid"].tolist()
    return np.array([uid if used else f"row {at}" for at, (uid, used) in enumerate(zip(uids, has_token, strict=True))])


def outcome_of(batch: DataProto) -> torch.Tensor:
    """Return the outcome of each response, (B,): ``acc`` if the reward function returns it, else the score."""
    tensors = tensors_of(batch)
    if "acc" in tensors.keys():
        return tensors["acc"].float()
    scores = tensors["token_level_scores"].sum(-1).tolist()
    said = batch.non_tensor_batch.get("acc", [None] * len(batch))
    return torch.tensor([score if acc is None else float(acc) for acc, score in zip(said, scores, strict=True)])
