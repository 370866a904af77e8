"""The reward model: one score per response."""

import logging
import os
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.base_config import build_node
from verl.errors import WrongInput
from verl.models.transformers.vision import is_vision_config
from verl.protocol import DataProto, tensors_of
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.chat_template import check_template
from verl.utils.faults import fault_point
from verl.utils.fs import copy_to_local
from verl.utils.hub import cached_folder, model_folder
from verl.utils.model import get_generation_config
from verl.utils.profiler.profile import DistProfiler
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_functional import at_last_sampled
from verl.workers.config import RewardModelConfig
from verl.workers.engine.passes import PassSpec, response_mask_of
from verl.workers.rewards.chat_rendering import ChatRenderer
from verl.workers.rewards.judge import Judge
from verl.workers.rewards.scoring import sampled_mask
from verl.workers.roles.base import EngineWorker
from verl.workers.roles.batching import BatchInfo, per_rank_micro_batch
from verl.workers.rollout import build_rollout

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.engine import BaseEngine

logger = logging.getLogger(__name__)

MESHES = ("reward", "reward_model")
"""Both names of the one mesh in the established verl interface."""


class RewardModelWorker(EngineWorker):
    """Scores of whole responses by a model that does not learn: a classifier, or a generative judge."""

    def __init__(self, config: "RewardModelConfig | DictConfig") -> None:
        self.config: RewardModelConfig = build_node(config, RewardModelConfig)
        super().__init__(timeout_s=self.config.nccl_timeout)
        for mesh in MESHES:
            if self.config.is_generative:
                self.register_mesh(mesh, self.config.as_rollout_config().workers_per_engine)
            else:
                self.register_engine_mesh(mesh, self.config)
        self.use_profilers(reward_model=self.config.profiler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, and load the tokenizers if chats are rendered again."""
        config = self.config
        was_checked = cached_folder(config.model.path) is not None
        model_config = config.model.as_model_config()
        # A model that was already on this machine was checked before the run started.
        if config.model.input_tokenizer is not None and not was_checked:
            check_template({}, model_config.tokenizer.chat_template)
        if config.is_generative:
            rollout = build_rollout(config.as_rollout_config(), model_config)
            self.judge = Judge(config, model_config, rollout, *self._policy_tokenizer())
            return
        self.engine = self.build_engine("reward_model", model_config, config)
        dp_size = self.engine.get_data_parallel_size()
        self.spec = PassSpec(
            config.use_dynamic_bsz,
            per_rank_micro_batch(config.micro_batch_size_per_gpu, config.micro_batch_size, dp_size),
            config.forward_max_token_len_per_gpu,
        )
        self.vocab_size: int = model_config.hf_config.get_text_config().vocab_size
        self.sees = is_vision_config(model_config.hf_config)
        self.switch: ChatRenderer | None = None
        if config.model.input_tokenizer is not None:
            source, ends = self._policy_tokenizer()
            self.switch = ChatRenderer(source, model_config.tokenizer, config.max_length, config.truncation, ends)
        if self.sees and self.switch is not None:
            logger.warning(
                "reward_model.model.input_tokenizer is set: images are dropped when chats are re-rendered; write null "
                "if both models share the processor"
            )

    def _policy_tokenizer(self) -> tuple[PreTrainedTokenizerBase, set[int]]:
        """Return the policy's tokenizer, and the tokens at which its responses end."""
        model = self.config.model
        assert model.input_tokenizer is not None
        folder = copy_to_local(model_folder(os.path.expanduser(model.input_tokenizer)), use_shm=model.use_shm)
        tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        generation = get_generation_config(folder)  # None for a folder that holds a tokenizer only
        ends = None if generation is None else generation.eos_token_id
        return tokenizer, {tokenizer.eos_token_id, *([ends] if isinstance(ends, int) else ends or ())}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    @DistProfiler.annotate(color="brown", role="reward_model_score")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` (B, R): the score of each response at its last sampled token, zero elsewhere."""
        fault_point("compute_rm_score", rank=self.rank, step=BatchInfo.of(data).step)
        if self.config.is_generative:
            scores, metrics = self.judge(data)
        else:
            used: dict[str, float] = {}
            with self.accounted(used, "reward_model", data):
                scores, metrics = self._classify(data)
            metrics |= used
        placed = at_last_sampled(scores.float(), sampled_mask(data))
        return DataProto.from_dict(tensors={"rm_scores": placed}, meta_info={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"), blocking=False)
    def start_rm_score(self, data: DataProto) -> DataProto:
        """Run ``compute_rm_score``, which a subclass may override, while the driver continues with a future."""
        return self.compute_rm_score(data)

    def _classify(self, data: DataProto) -> tuple[Tensor, dict[str, float]]:
        """Return the values (B,) at the last token of each row, and the share of rows that were cut."""
        metrics: dict[str, float] = {}
        shown = None
        batch = tensors_of(data)
        if self.switch is None:
            rows = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            shown = self._shown(data, rows)
        else:
            rows, num_cut = self.switch(data)
            metrics["reward_model/truncated_ratio"] = num_cut / len(data)
        largest = int(rows["input_ids"].max())
        if largest >= self.vocab_size:
            raise WrongInput(
                f"the batch holds token {largest}, but the reward model has {self.vocab_size} tokens: set "
                "reward_model.model.input_tokenizer to the policy's tokenizer, which tokenizes the texts again"
            )
        return last_values(self.engine, rows, self.spec, shown, response_mask_of(data)), metrics

    def _shown(self, data: DataProto, rows: dict[str, Tensor]) -> np.ndarray | None:
        """Return the images of the rows for a vision model; for a text model, reduce position ids to the text axis.

        Raises: ValueError naming a row with images that a text model would have to score.
        """
        shown: np.ndarray | None = data.non_tensor_batch.get("multi_modal_inputs")
        if self.sees:
            return shown
        if rows["position_ids"].dim() == 3:
            rows["position_ids"] = rows["position_ids"][:, 0]
        for index, row in enumerate(() if shown is None else shown):
            if row:
                raise WrongInput(
                    f"row {index} of the batch holds images or videos, but reward_model.model.path is a text model: "
                    "name a vision model, or set reward_model.model.input_tokenizer to the policy's tokenizer, which "
                    "scores the text alone"
                )
        return None


def last_values(
    engine: "BaseEngine",
    rows: dict[str, Tensor],
    spec: PassSpec,
    shown: np.ndarray | None = None,
    sampled: Tensor | None = None,
) -> Tensor:
    """Run a reward model; returns the (B,) values at the last valid token of each row.

    Args:
        shown: (B,) ``multi_modal_inputs`` of the rows.
        sampled: (B, R), 1 for each token that the policy has sampled; these stand for no image.
    """
    mask = rows["attention_mask"].bool()
    columns = torch.arange(mask.shape[1])
    last = (mask * columns).argmax(-1)
    read = (columns == last.unsqueeze(1)) & mask  # a row of padding has none
    counted = read
    if shown is not None and sampled is not None:
        counted = read | F.pad(sampled.bool(), (mask.shape[1] - sampled.shape[1], 0))
    data = DataProto.from_dict(
        tensors={**rows, "responses": rows["input_ids"], "response_mask": counted.long()},
        non_tensors={} if shown is None else {"multi_modal_inputs": shown},
    )
    with engine.eval_mode():
        values = engine.infer_batch(data, spec)["values"]
    return (values * read).sum(-1)
