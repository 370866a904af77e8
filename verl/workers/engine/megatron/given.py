"""An engine around chunks of a model and an optimizer that the caller has built."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.core.distributed import DistributedDataParallel

from verl.models.mcore.gpt.build import attach_fused_head, attach_picker
from verl.utils.megatron.offload import Offload
from verl.workers.engine.megatron.engine import MegatronEngine
from verl.workers.engine.megatron.forward import Forward
from verl.workers.engine.megatron.layout import make_layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

EngineT = TypeVar("EngineT", bound=MegatronEngine)


def engine_of_modules(
    cls: type[EngineT],
    modules: Sequence[Any],
    optimizer: Any,
    hf_config: "PretrainedConfig",
    engine_config: "McoreEngineConfig",
    optimizer_config: "McoreOptimizerConfig | None" = None,
    fuses_head: bool = False,
) -> EngineT:
    """Return an engine around the chunks of this rank, each a ``GPTModel`` or one in ``DistributedDataParallel``.

    Without ``optimizer`` it only infers; ``fuses_head`` lets a policy score tokens without making logits. The layout is
    that of the process, which ``engine_config`` has to name.

    Raises: ValueError when the chunks train and are not wrapped, or the process has another layout.
    """
    engine = cls(None, engine_config, optimizer_config)  # type: ignore[arg-type]  # what builds and saves is not used
    engine.layout = make_layout(engine_config)
    engine.hf_config = hf_config
    engine.module = list(modules)
    if optimizer is not None and not all(isinstance(each, DistributedDataParallel) for each in engine.module):
        raise ValueError(
            "an optimizer needs modules in Megatron-Core's DistributedDataParallel, which add gradients up"
        )
    engine.models = [each.module if isinstance(each, DistributedDataParallel) else each for each in engine.module]
    for model in engine.models:
        attach_picker(model, engine.layout.tp_group)
        if fuses_head:
            attach_fused_head(model, hf_config.vocab_size, engine.layout.tp_group)
    engine.forward = Forward(
        engine.layout,
        engine.is_value_model,
        hf_config.vocab_size,
        engine.models[0].config.sequence_parallel,
        engine.lead,
        fuses_head,
    )
    engine.optimizer = optimizer
    engine.offload = Offload(engine.module, engine.optimizer, engine.layout.device)
    engine._set_training(False)
    return engine
