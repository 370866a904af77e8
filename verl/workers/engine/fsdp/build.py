"""Build a sharded module with the weights of a checkpoint, and export them under the names of a checkpoint."""

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.base_config import ConfigError, Violation
from verl.errors import ModelWeightsError, WrongInput
from verl.models.transformers.attention import VARLEN_ATTENTION, register_varlen_attention
from verl.models.transformers.attention_choice import class_of, padded_attention
from verl.models.transformers.dense_common import install_fused_head
from verl.models.transformers.liger import install_liger
from verl.models.transformers.names import SHARED_FAMILIES
from verl.models.transformers.packing import packing_problem
from verl.models.transformers.remote import builds_own_attention
from verl.models.transformers.vision import is_vision_config, uses_media
from verl.utils.flops_counter import AdapterSizes
from verl.utils.fsdp_utils import apply_fsdp2, parameters_on_meta, sharding_units
from verl.utils.kernel.linear_cross_entropy import backend_of
from verl.utils.model import (
    VisionValueModel,
    get_hf_auto_model_class,
    get_value_model_class,
    get_vl_model_vision_tower,
    stored_buffers,
)
from verl.utils.ulysses import validate_ulysses_config
from verl.workers.engine.background_load import Values, fill, place
from verl.workers.engine.fsdp.adapters import adapter_sizes, add_adapters, base_name, is_adapter
from verl.workers.engine.fsdp.compute_copies import ComputeCopies, dtype_of_copies
from verl.workers.engine.fsdp.layout import Layout
from verl.workers.engine.fsdp.stored_model import StoredModel, WeightFiles
from verl.workers.engine.weights import DTYPES, HEAD, draw_tensor, head_aliases, open_weights, tensor_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from verl.workers.config import FSDPEngineConfig, HFModelConfig

logger = logging.getLogger(__name__)

LocalReader = Callable[[str, torch.Size, slice], Tensor | None]
"""(name, whole shape, rows) -> those rows, or None for a tensor that the checkpoint does not hold."""


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


def packed_implementation(model_config: "HFModelConfig", sp_size: int) -> str:
    """Resolve ``override_config.attn_implementation`` for packed rows.

    Raises: ValueError when it cannot serve sequence parallelism.
    """
    asked: str | None = model_config.override_config.get("attn_implementation")
    if sp_size > 1:
        if not model_config.use_remove_padding:
            raise WrongInput(
                f"ulysses_sequence_parallel_size={sp_size} needs padding removal: set model.use_remove_padding=True"
            )
        if asked not in (None, VARLEN_ATTENTION, "flash_attention_2"):
            raise WrongInput(
                f"model.override_config.attn_implementation={asked!r} has no sequence parallelism: leave it "
                f"out or write {VARLEN_ATTENTION}"
            )
        return VARLEN_ATTENTION
    chunk = getattr(model_config.hf_config.get_text_config(), "attention_chunk_size", None)
    if chunk is not None and asked not in (None, VARLEN_ATTENTION):
        raise WrongInput(
            f"model.override_config.attn_implementation={asked} would count the chunks of attention_chunk_size={chunk} "
            "from the first of the packed rows: leave it out"
        )
    return asked or VARLEN_ATTENTION


def own_attention_implementation(model_config: "HFModelConfig") -> str:
    """Resolve ``override_config.attn_implementation`` for a model with its own table of attentions."""
    asked: str | None = model_config.override_config.get("attn_implementation")
    return "eager" if asked in (None, VARLEN_ATTENTION) else asked


def use_packed_attention(module: nn.Module) -> None:
    """Make a built transformers model take packed sequences.

    Raises: ValueError when it cannot.
    """
    if builds_own_attention(getattr(module, "config", None)):
        return
    register_varlen_attention()
    choose = getattr(module, "set_attn_implementation", None)
    if choose is None:
        raise ValueError(
            f"use_remove_padding=True needs a transformers model, not {type(module).__name__}: write False"
        )
    choose(VARLEN_ATTENTION)


def keep_attention_whole(module: nn.Module, device: torch.device) -> None:
    """Replace the attention of a built transformers model if it drops a feature that the configuration asks for."""
    config = getattr(module, "config", None)
    if config is None or config.get_text_config()._attn_implementation != "sdpa":
        return
    dtype = next(module.parameters()).dtype
    chosen = padded_attention(config, type(module), device, dtype, None)
    if chosen != "sdpa":
        module.set_attn_implementation(chosen)  # type: ignore[operator]


# The module


@dataclass
class ModelBuilder:
    """Builds the module of one engine, step by step.

    ``build`` sets ``adapter_sizes``, ``layout`` to one without a mesh if it wraps nothing, and ``prefixed`` to whether
    the files have prefixes that the model lacks.
    """

    model_config: "HFModelConfig"
    engine_config: "FSDPEngineConfig"
    layout: Layout
    is_value_model: bool
    makes_head: bool = True
    freeze_vision_tower: bool = False
    adapter_sizes: AdapterSizes | None = None
    prefixed: bool = False

    def build(self) -> nn.Module:
        """Build the module, sharded by the layout; ``fill`` loads its weights.

        Raises: ValueError naming the file, tensor or key that is wrong.
        """
        register_varlen_attention()
        hf_config = self._config()
        text = hf_config.get_text_config()
        if self.layout.sp_size > 1:
            validate_ulysses_config(
                text.num_attention_heads, self.layout.sp_size, getattr(text, "num_key_value_heads", None)
            )
        self._check_family(hf_config)
        auto_class = get_value_model_class(hf_config) if self.is_value_model else get_hf_auto_model_class(hf_config)
        try:
            with parameters_on_meta():
                model: PreTrainedModel = auto_class.from_config(hf_config, **self._load_kwargs(auto_class))
        except KeyError as error:  # transformers looks names up, of an activation or a kind of RoPE for instance
            if VARLEN_ATTENTION in error.args:
                raise WrongInput(
                    f"use_remove_padding=True: the code in the repository of model.path={self.model_config.path} has "
                    "no attention for packed sequences: write False; or trust_remote_code=False, if transformers has "
                    f"model_type={hf_config.model_type!r} itself"
                ) from error
            raise WrongInput(
                f"model.path={self.model_config.path}: its config.json names {error}, which the installed transformers "
                "does not know: correct it, or install a version that does"
            ) from error
        if self.is_value_model:
            model.config.architectures = [type(model).__name__]
        files = open_weights(self.model_config.local_path, f"model.path={self.model_config.path}")
        self.prefixed = remember_conversions(model, files.names())
        read_rows = self._reader(model, files)
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
            self._shard(module, model)
        is_on_host = self.engine_config.offload_policy or self.engine_config.param_offload
        home = torch.device("cpu") if is_on_host else self.layout.device
        load_buffers(module, read_rows)
        empty = materialize(module, home)
        read = partial(_values, empty, self.layout.shard_group, read_rows, self._initialize)
        fill((each.memory for each in empty), read)
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(self.layout.device)
        return module

    def _shard(self, module: nn.Module, model: PreTrainedModel) -> None:
        """Shard the module; on one rank, let it compute with copies of its weights if that is equivalent."""
        config = self.engine_config
        if self.layout.world_size == 1 and not config.offload_policy:
            policy = precision_policy(config, self.layout.device)
            dtype = dtype_of_copies(module, policy, keeps_gathered=not config.reshard_after_forward)
            if dtype is not None:
                ComputeCopies(module, sharding_units(module, model, config.wrap_policy), dtype)
                self.layout = replace(self.layout, fsdp_mesh=None, shard_group=None)
                return
        shard(module, model, config, self.layout)

    def _config(self) -> "PretrainedConfig":
        hf_config: PretrainedConfig = deepcopy(self.model_config.hf_config)
        if self.is_value_model:
            hf_config.num_labels = 1
            hf_config.classifier_dropout = 0.0
            hf_config.hidden_dropout = 0.0
            hf_config.summary_dropout_prob = 0.0
        return hf_config

    def _check_family(self, hf_config: "PretrainedConfig") -> None:
        if self.model_config.use_remove_padding and (problem := packing_problem(hf_config.to_dict())):
            raise ConfigError([Violation("model.use_remove_padding", True, problem)])
        if is_vision_config(hf_config) and not uses_media(hf_config) and self.layout.world_size > 1:
            raise ValueError(
                f"model_type={hf_config.model_type!r} has a vision tower that several ranks cannot share: ranks "
                f"without an image would not run it. Train one of {', '.join(SHARED_FAMILIES)}, use one worker, or add "
                "the family (docs/advance/multi_modal.md)"
            )

    def _load_kwargs(self, auto_class: "type[_BaseAutoModelClass] | VisionValueModel") -> dict[str, Any]:
        return {
            "attn_implementation": self._attention(auto_class),
            "dtype": DTYPES[self.engine_config.model_dtype],
            "trust_remote_code": self.model_config.trust_remote_code,
        }

    def _attention(self, auto_class: "type[_BaseAutoModelClass] | VisionValueModel") -> str:
        hf_config = self.model_config.hf_config
        packed = self.model_config.use_remove_padding
        if packed or self.layout.sp_size > 1:
            chosen = packed_implementation(self.model_config, self.layout.sp_size)
        if builds_own_attention(hf_config):
            return own_attention_implementation(self.model_config)
        if packed and chosen == VARLEN_ATTENTION:
            return chosen
        asked = chosen if packed else self.model_config.override_config.get("attn_implementation")
        policy = precision_policy(self.engine_config, self.layout.device)
        dtype = (policy and policy.param_dtype) or DTYPES[self.engine_config.model_dtype]
        return padded_attention(hf_config, class_of(auto_class, hf_config), self.layout.device, dtype, asked)

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
            install_liger(model)
        if self.model_config.use_fused_kernels and not self.is_value_model:
            backend = self.model_config.fused_kernel_options["impl_backend"]
            backend_of(backend, self.layout.device)  # raises if the backend cannot run on the device
            install_fused_head(model, backend)
        if self.model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _reader(self, model: PreTrainedModel, files: WeightFiles) -> LocalReader:
        """Return how a rank reads its rows: of the model's tensors, and of a value head under another name."""
        stored = StoredModel(model, files)
        heads: dict[str, str] = {}
        if self.is_value_model:
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            source = f"model.path={self.model_config.path}"
            heads = head_aliases(
                source, self.model_config.local_path, files.names(), files.shape, self.makes_head, is_first
            )

        def read(name: str, shape: torch.Size, rows: slice) -> Tensor | None:
            value = stored.read(name, shape, rows)
            if value is None and heads.get(name) in files.names():
                value = files.read(heads[name], shape, rows)
            return value

        return read

    def _initialize(self, name: str, shape: torch.Size, rows: slice) -> Tensor | None:
        """Draw a new head or adapter from the seed and its name, so that every layout has the same."""
        generator = torch.Generator().manual_seed(tensor_seed(self.engine_config.seed, name))
        if is_adapter(name):
            if "lora_B" in name:
                return torch.zeros(shape, dtype=torch.float32)[rows]
            bound = 1.0 / math.sqrt(shape[-1])  # kaiming_uniform with a = sqrt(5), as peft starts lora_A
            return (torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1).mul_(bound)[rows]
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


# Weights of a checkpoint


def local_rows(shape: torch.Size, group: ProcessGroup | None) -> slice:
    """Return the rows of a tensor that this rank's shard holds, cut over the group as ``Shard(0)`` does."""
    if not shape or group is None:
        return slice(None)
    step = -(-shape[0] // group.size())
    start = min(group.rank() * step, shape[0])
    return slice(start, min(start + step, shape[0]))


class Empty(NamedTuple):
    """A parameter of a module that has no value yet: its name and whole shape, and the memory of this rank's rows."""

    name: str
    shape: torch.Size
    memory: Tensor


def materialize(model: nn.Module, device: torch.device) -> list[Empty]:
    """Give every meta parameter memory for its shard on ``device``. Tied parameters stay one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    empty: list[Empty] = []
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        memory = torch.empty_like(parameter.detach(), device=device)
        new = nn.Parameter(memory, requires_grad=parameter.requires_grad)
        for module, attribute in places[id(parameter)]:
            setattr(module, attribute, new)
        empty.append(Empty(name, parameter.shape, memory.to_local() if isinstance(memory, DTensor) else memory))
    return empty


def _values(empty: Sequence[Empty], group: ProcessGroup | None, read: LocalReader, initialize: LocalReader) -> Values:
    """Fill each memory from the checkpoint or, if a tensor is new, from ``initialize``; see ``fill``.

    Each rank reads only its shard, so no rank ever holds the whole model.

    Raises: ModelWeightsError for tensors that neither source has.
    """
    missing = []
    for name, shape, memory in empty:
        rows = local_rows(shape, group)
        plain = base_name(name)
        local = None if plain is None else read(plain, shape, rows)
        if local is None:
            local = initialize(name, shape, rows)
        if local is None:
            missing.append(name)
        else:  # copied, since a slice of a file may be a view into all of it, and saving it would save the whole file
            yield from place(local, memory)
    if missing:
        raise ModelWeightsError(
            f"the checkpoint lacks {len(missing)} tensors of the model, the first is {missing[0]!r}: "
            "model.path must hold the whole model of its config.json"
        )


def _hold_in_fp32(model: nn.Module, pattern: str) -> None:
    """Widen the buffers whose names hold a pattern of transformers."""
    for path, part in model.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and pattern in f"{path}.{name}":
                part._buffers[name] = buffer.float()


def load_buffers(model: nn.Module, read: LocalReader) -> None:
    """Fill the persistent buffers from a checkpoint; a missing one keeps the value of a new model, with a warning.

    Buffers are not sharded. A buffer that transformers always holds in fp32, such as the bias of a router, also gets
    fp32 here.
    """
    kept = []
    for part in model.modules():
        for name in getattr(part, "_keep_in_fp32_modules_strict", None) or ():
            _hold_in_fp32(part, name)
    for name, buffer in stored_buffers(model):
        plain = base_name(name)
        value = None if plain is None else read(plain, buffer.shape, slice(None))
        if value is not None:
            buffer.copy_(value)
        elif plain is not None:
            kept.append(plain)
    if kept:
        logger.warning(
            "the checkpoint lacks %d buffers of the model, the first is %r: they start as new", len(kept), kept[0]
        )


def remember_conversions(model: "PreTrainedModel", stored: Collection[str] = (), prefixed: bool = False) -> bool:
    """Keep transformers' weight conversions for this class, which it finds by a class name that sharding changes.

    Changes of a prefix are kept if ``prefixed``, or if they lead to more of the ``stored`` names: save_pretrained of a
    new model leaves them out.

    Returns: whether they are kept.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(model, add_legacy=False)
    plain = [step for step in found if not isinstance(step, PrefixChange)]
    if len(plain) < len(found) and not prefixed:
        counts = [len(_names_by(model, steps).intersection(stored)) for steps in (plain, found)]
        prefixed = counts[1] > counts[0]
    model._weight_conversions = found if prefixed else plain  # type: ignore[assignment]
    return prefixed


def _names_by(model: "PreTrainedModel", steps: Sequence[Any]) -> set[str]:
    model._weight_conversions = list(steps)  # type: ignore[assignment]
    return {name for name, _ in checkpoint_names(model, iter(model.named_parameters()))}


def only_moves_values(model: "PreTrainedModel") -> bool:
    """Whether ``checkpoint_names`` only moves values, without arithmetic, as all conversions of transformers do."""
    steps = getattr(model, "_weight_conversions", None) or ()
    operations = [operation for step in steps for operation in getattr(step, "operations", ())]
    return all(type(each).__module__ == "transformers.core_model_loading" for each in operations)


def checkpoint_names(model: "PreTrainedModel", stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert in-memory tensors to the names and layout of a published checkpoint, one at a time.

    These are what ``save_pretrained`` writes, except for the stacked experts of Qwen3-VL: published files and vLLM have
    them transposed, transformers 5 reads both layouts and writes its own.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, revert_weight_conversion

    steps = getattr(model, "_weight_conversions", None)
    if steps is None:
        steps = get_model_conversion_mapping(model, add_legacy=False)
    if not steps:
        yield from stream
        return
    model._weight_conversions = steps  # type: ignore[assignment]
    for operation in (each for step in steps for each in getattr(step, "operations", ())):
        if isinstance(operation, Transpose):
            operation.check_dims = False
    for name, tensor in stream:
        yield from revert_weight_conversion(model, {name: tensor}).items()
