"""Actors of users' forks of verl: a worker runs the methods that a subclass overrides, in the worker's engine.

The workers call an actor only where a subclass has overridden a method. With a module that the caller has built, an
actor also works without a worker.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from verl.algos.mismatch import finish_gap_metrics
from verl.base_config import omega_conf_to_dataclass
from verl.models.transformers.dense_common import has_fused_head, install_fused_head
from verl.protocol import DataProto, tensors_of
from verl.workers.config import ActorConfig, FSDPEngineConfig
from verl.workers.engine import BaseEngine, FSDPEngine, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.forward import Forward
from verl.workers.engine.passes import PassSpec, temperature_of
from verl.workers.roles.base import engine_config_of, list_metrics
from verl.workers.roles.batching import mini_batches_of, policy_update_spec, rows_of_step, training_spec
from verl.workers.roles.losses import ppo_loss, select_tokens

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

ActorConfigT = TypeVar("ActorConfigT", bound=ActorConfig)


class BasePPOActor(Generic[ActorConfigT]):
    """The base of every actor around a module, which runs in the engine that the workers use.

    An actor without such an engine overrides ``compute_log_prob`` and ``update_policy``.
    """

    engine: BaseEngine

    def __init__(self, config: ActorConfigT) -> None:
        self.config = config

    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and, on request, entropies (B, R), zero outside the response mask.

        ``meta_info`` holds ``temperature``, ``use_dynamic_bsz``, and ``max_token_len`` or ``micro_batch_size``.

        Raises: ValueError naming what ``meta_info`` lacks.
        """
        spec = dataclasses.replace(PassSpec.from_caller(data), entropy="value" if calculate_entropy else "none")
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data, spec)
        return output["log_probs"], output.get("entropy")

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; returns each metric of each step.

        Args: ``data`` is the batch, or its mini-batches as ``make_minibatch_iterator`` returns them.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        config = self.config
        steps: list[dict[str, float]] = []
        loss_fn = partial(ppo_loss, config)
        per_pass = len(data) // self._rows_of_step(data) if isinstance(data, DataProto) else 1
        mini_batches = self.make_minibatch_iterator(data) if isinstance(data, DataProto) else data
        with self.engine.train_mode():
            for at, each in enumerate(mini_batches):
                spec = policy_update_spec(training_spec(config), config, each, temperature_of(each))
                select_tokens(config, self.engine, each, at // per_pass, spec)
                steps.append(finish_gap_metrics(self.engine.train_batch(each, loss_fn, spec)))
        return list_metrics(steps, prefix="actor/")

    def make_minibatch_iterator(self, data: DataProto) -> Iterator[DataProto]:
        """Return the mini-batches of all epochs.

        Raises: ValueError when ``meta_info`` lacks ``temperature``, or the rows do not divide into mini-batches.
        """
        temperature_of(data)
        return mini_batches_of(data, self.config, self._rows_of_step(data))

    def _rows_of_step(self, data: DataProto) -> int:
        return rows_of_step(data, self.config.ppo_mini_batch_size, self.engine.get_data_parallel_size())


class DataParallelPPOActor(BasePPOActor["FSDPActorConfig"]):
    """An actor on FSDP.

    Args:
        config: an actor node, whose batch sizes count rows of this rank.
        actor_module: a causal model of transformers; with several ranks, sharded by ``fully_shard``.
        actor_optimizer: None for an actor that only infers.
    """

    def __init__(
        self,
        config: "FSDPActorConfig | DictConfig",
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(omega_conf_to_dataclass(config))
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        if self.config.use_fused_kernels and not has_fused_head(actor_module):
            install_fused_head(actor_module)  # type: ignore[arg-type]
        packed = self.config.use_remove_padding
        self.run_in(engine_of_module(FSDPEngineWithLMHead, actor_module, actor_optimizer, self.config, packed))

    @classmethod
    def around(cls, engine: FSDPEngine, config: "FSDPActorConfig") -> Self:
        """Return an actor whose passes run in an existing engine; the batch sizes of ``config`` count rows."""
        actor = cls.__new__(cls)
        BasePPOActor.__init__(actor, config)
        actor.actor_module = engine.module
        actor.actor_optimizer = engine.optimizer
        actor.run_in(engine)
        return actor

    def run_in(self, engine: FSDPEngine) -> None:
        """Let an engine of this module run ``_forward_micro_batch`` and ``_optimizer_step`` of this actor."""
        given = {each.name: getattr(engine.forward, each.name) for each in dataclasses.fields(Forward)}
        engine.forward = self._forward = _ActorForward(**given, actor=self)
        engine.step_hook = self._optimizer_step
        self.engine = engine

    def _forward_micro_batch(
        self, micro_batch: Mapping[str, Any], temperature: float, calculate_entropy: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Return the entropies, if asked for, and the log-probabilities (b, R) of a micro-batch on the device.

        Both are zero outside the response mask. ``micro_batch`` holds its tensors and non-tensors by name.
        """
        entropy = self._forward.spec.entropy if calculate_entropy else "none"
        if calculate_entropy and entropy == "none":
            entropy = "grad"
        spec = dataclasses.replace(self._forward.spec, temperature=temperature, entropy=entropy)
        output = self._forward.run(DataProto.from_single_dict(micro_batch), spec)
        return output.get("entropy"), output["log_probs"]

    def _optimizer_step(self) -> float | Tensor:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""
        return self.engine.optimizer_step()


@dataclasses.dataclass(eq=False)
class _ActorForward(Forward):
    """Runs each micro-batch by a method of the actor that a subclass may override; ``spec`` has the pass's options."""

    actor: DataParallelPPOActor | None = None
    spec: PassSpec = PassSpec()

    def __call__(self, rows: DataProto, spec: PassSpec) -> dict[str, Tensor]:
        if spec.full_kl:  # the actor's own method cannot return the divergence from a reference
            return self.run(rows, spec)
        assert self.actor is not None
        self.spec = spec
        entropy, log_probs = self.actor._forward_micro_batch(
            {**tensors_of(rows), **rows.non_tensor_batch},
            temperature=spec.temperature,
            calculate_entropy=spec.entropy != "none",
        )
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    def run(self, rows: DataProto, spec: PassSpec) -> dict[str, Tensor]:
        """Run the model on the rows; see ``Forward``."""
        return super().__call__(rows, spec)


def engine_of_module(
    cls: type[FSDPEngine],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: "FSDPActorConfig | FSDPCriticConfig",
    remove_padding: bool,
) -> FSDPEngine:
    """Return an FSDP engine around the module."""
    engine = engine_config_of(config)
    assert isinstance(engine, FSDPEngineConfig)
    return cls.from_module(
        module, optimizer, remove_padding=remove_padding, engine_config=engine, optimizer_config=config.optimizer()
    )
