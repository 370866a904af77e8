"""Build a sharded module with its weights from a model configuration."""

import logging
import math
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import PreTrainedModel

from verl.models.transformers.attention import VARLEN_ATTENTION, register_varlen_attention
from verl.models.transformers.dense_common import install_fused_head
from verl.models.transformers.names import VISION_FAMILIES
from verl.models.transformers.vision import is_vision_config, uses_media
from verl.utils.flops_counter import AdapterSizes
from verl.utils.fsdp_utils import apply_fsdp2, parameters_on_meta
from verl.utils.kernel.linear_cross_entropy import backend_of
from verl.utils.model import VisionValueModel, get_hf_auto_model_class, get_value_model_class, get_vl_model_vision_tower
from verl.utils.ulysses import validate_ulysses_config
from verl.workers.engine.fsdp.adapters import adapter_sizes, add_adapters, base_name, is_adapter
from verl.workers.engine.fsdp.layout import Layout
from verl.workers.engine.fsdp.weights import LocalReader, checkpoint_reader, materialize, remember_conversions
from verl.workers.engine.weights import DTYPES, HEAD, CheckpointError, draw_tensor, tensor_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from verl.workers.config import FSDPEngineConfig, HFModelConfig

logger = logging.getLogger(__name__)

# Precision and attention


def precision_policy(config: "FSDPEngineConfig", device: torch.device) -> MixedPrecisionPolicy | None:
    """Return the dtypes that FSDP computes and reduces in, or None if both are the dtype of the parameters.

    The default on accelerators is bf16 with fp32 reduction: sums over many ranks lose small terms in bf16. On the CPU
    it is the dtype of the parameters.
    """
    given = config.mixed_precision or {}
    if not given and device.type == "cpu":
        return None
    param = DTYPES[given.get("param_dtype", "bf16" if device.type != "cpu" else config.model_dtype)]
    reduce = DTYPES[given.get("reduce_dtype", "fp32")]
    if param == DTYPES[config.model_dtype] == reduce:
        return None
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=True)


def attention_implementation(model_config: "HFModelConfig", sp_size: int) -> str:
    """Resolve ``override_config.attn_implementation``.

    Raises: ValueError when it cannot serve sequence parallelism.
    """
    packed = model_config.use_remove_padding
    asked: str | None = model_config.override_config.get("attn_implementation")
    if sp_size > 1:
        if not packed:
            raise ValueError(
                f"ulysses_sequence_parallel_size={sp_size} needs padding removal: set model.use_remove_padding=True"
            )
        if asked not in (None, VARLEN_ATTENTION, "flash_attention_2"):
            raise ValueError(
                f"model.override_config.attn_implementation={asked!r} has no sequence parallelism: leave it "
                f"out or write {VARLEN_ATTENTION}"
            )
        return VARLEN_ATTENTION
    return asked or (VARLEN_ATTENTION if packed else "sdpa")


def use_packed_attention(module: nn.Module) -> None:
    """Make a built transformers model take packed sequences.

    Raises: ValueError when it cannot.
    """
    register_varlen_attention()
    choose = getattr(module, "set_attn_implementation", None)
    if choose is None:
        raise ValueError(
            f"use_remove_padding=True needs a transformers model, not {type(module).__name__}: write False"
        )
    choose(VARLEN_ATTENTION)


# The module


@dataclass
class ModelBuilder:
    """Make the module of one engine, step by step; ``build`` sets ``adapter_sizes``."""

    model_config: "HFModelConfig"
    engine_config: "FSDPEngineConfig"
    layout: Layout
    is_value_model: bool
    makes_head: bool = True
    freeze_vision_tower: bool = False
    adapter_sizes: AdapterSizes | None = None

    def build(self) -> nn.Module:
        """Return the module with its weights, sharded as the layout says.

        Raises: ValueError naming the file, tensor or key that is wrong.
        """
        register_varlen_attention()
        hf_config = self._config()
        text = hf_config.get_text_config()
        validate_ulysses_config(
            text.num_attention_heads, self.layout.sp_size, getattr(text, "num_key_value_heads", None)
        )
        self._check_family(hf_config)
        auto_class = get_value_model_class(hf_config) if self.is_value_model else get_hf_auto_model_class(hf_config)
        with parameters_on_meta():
            model: PreTrainedModel = auto_class.from_config(hf_config, **self._load_kwargs())
        remember_conversions(model)
        read = self._reader(model, auto_class)
        self._freeze(model)
        module: nn.Module = model
        if self.model_config.lora_rank:
            trained = ("score",) if self.is_value_model else ()
            with parameters_on_meta():
                module = add_adapters(model, self.model_config, trained, self.freeze_vision_tower)
            self.adapter_sizes = adapter_sizes(module)
        model.config.use_cache = False
        self._patch(model)
        if self.layout.fsdp_mesh is not None:
            shard(module, model, self.engine_config, self.layout)
        home = torch.device("cpu") if self.engine_config.offload_policy else self.layout.device
        materialize(module, self.layout.shard_group, home, read, self._initialize)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(self.layout.device)
        return module

    def _config(self) -> "PretrainedConfig":
        hf_config: PretrainedConfig = deepcopy(self.model_config.hf_config)
        if self.is_value_model:
            hf_config.num_labels = 1
            hf_config.classifier_dropout = 0.0
            hf_config.hidden_dropout = 0.0
            hf_config.summary_dropout_prob = 0.0
        return hf_config

    def _check_family(self, hf_config: "PretrainedConfig") -> None:
        if is_vision_config(hf_config) and not uses_media(hf_config) and self.layout.world_size > 1:
            raise ValueError(
                f"model_type={hf_config.model_type!r} has a vision tower that several ranks cannot share: ranks "
                f"without an image would not run it. Train one of {', '.join(VISION_FAMILIES)}, use one worker, or add "
                "the family (docs/advance/multi_modal.md)"
            )

    def _load_kwargs(self) -> dict[str, Any]:
        return {
            "attn_implementation": attention_implementation(self.model_config, self.layout.sp_size),
            "dtype": DTYPES[self.engine_config.model_dtype],
            "trust_remote_code": self.model_config.trust_remote_code,
        }

    def _freeze(self, model: PreTrainedModel) -> None:
        """Keep the weights of the vision tower.

        Raises: ValueError when the model has none.
        """
        if not self.freeze_vision_tower:
            return
        tower = get_vl_model_vision_tower(model)
        if tower is None:
            raise ValueError(f"freeze_vision_tower=True needs a model with a vision tower, not {type(model).__name__}")
        tower.requires_grad_(False)

    def _patch(self, model: PreTrainedModel) -> None:
        if self.model_config.use_liger:
            try:
                from liger_kernel.transformers import _apply_liger_kernel_to_instance
            except ImportError:
                raise ValueError(
                    "model.use_liger=True needs the package liger-kernel: install it or write False"
                ) from None
            _apply_liger_kernel_to_instance(model=model)
        if self.model_config.use_fused_kernels and not self.is_value_model:
            backend = self.model_config.fused_kernel_options["impl_backend"]
            backend_of(backend, self.layout.device)  # raises if it cannot run there
            install_fused_head(model, backend)
        if self.model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _reader(
        self, model: PreTrainedModel, auto_class: "type[_BaseAutoModelClass] | VisionValueModel"
    ) -> LocalReader:
        """Return a function that reads the shard of a parameter by its name in the adapted model."""

        path: str = self.model_config.local_path

        def load_whole() -> dict[str, Tensor]:
            options = self._load_kwargs() | {"low_cpu_mem_usage": True, "output_loading_info": True}
            try:
                loaded: Any = auto_class.from_pretrained(path, config=self._config(), **options)
            except (OSError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"cannot load the weights of model.path={path}: {error}") from error
            whole, report = loaded  # two values, because of output_loading_info
            # Missing tensors were drawn from the random state of this process; ``_initialize`` draws them instead.
            return {name: p for name, p in whole.named_parameters() if name not in report["missing_keys"]}

        read_base = checkpoint_reader(path, model, load_whole)

        def read(name: str, shape: torch.Size, rows: slice) -> Tensor | None:
            plain = base_name(name)
            return None if plain is None else read_base(plain, shape, rows)

        return read

    def _initialize(self, name: str, shape: torch.Size, rows: slice) -> Tensor | None:
        """Draw a new head or adapter from the seed and its name, so that every layout has the same."""
        generator = torch.Generator().manual_seed(tensor_seed(self.engine_config.seed, name))
        if is_adapter(name):
            if "lora_B" in name:
                return torch.zeros(shape)[rows]
            bound = 1.0 / math.sqrt(shape[-1])  # kaiming_uniform with a = sqrt(5), as peft starts lora_A
            return (torch.rand(shape, generator=generator) * 2 - 1).mul_(bound)[rows]
        # Heads for sequence classification have no bias.
        if self.is_value_model and HEAD in name and (self.makes_head or name.endswith("bias")):
            return draw_tensor(name, shape, self.engine_config.seed, self.model_config.hf_config)[rows]
        return None


def shard(module: nn.Module, model: PreTrainedModel, config: "FSDPEngineConfig", layout: Layout) -> None:
    """Apply ``fully_shard`` to every unit and to the root."""
    kwargs: dict[str, Any] = {"mesh": layout.fsdp_mesh, "reshard_after_forward": config.reshard_after_forward}
    policy = precision_policy(config, layout.device)
    if policy is not None:
        kwargs["mp_policy"] = policy
    if config.offload_policy:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=layout.device.type != "cpu")
    # The logits of a value head are a view, and FSDP2 warns of in-place changes; nothing here makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    apply_fsdp2(module, kwargs, config, model)
