"""LoRA adapters of the FSDP engine, through peft."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.base_config import one_line
from verl.errors import WrongInput
from verl.models.transformers.balancing import returns_router_logits
from verl.utils.checkpoint.files import ADAPTER_FOLDER as ADAPTER_FOLDER
from verl.utils.flops_counter import AdapterSizes
from verl.utils.fsdp_utils import ADAPTED, ADAPTER_MARK, ADAPTER_PREFIX, full_tensor, without_wrappers
from verl.utils.model import VISION_TOWERS, is_named, stored_buffers
from verl.utils.torch_dtypes import smaller_dtype

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from verl.workers.config import HFModelConfig

ALL_LINEAR = "all-linear"
_DEFAULT = "default"
_READ_BY_PARENT = {
    "JambaMamba": ("dt_proj",),
    "Mamba": ("x_proj", "dt_proj", "out_proj"),
    "LongcatFlashTopkRouter": ("classifier",),
    "Gemma3nTextAltUp": ("prediction_coefs", "correction_coefs"),
}
"""Layers whose weight their parent reads, by a part of the name of its class. Short convolutions are another kind."""

logger = logging.getLogger(__name__)


def has_adapters(module: nn.Module) -> bool:
    """Whether peft wraps the module."""
    return hasattr(module, "peft_config")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return ADAPTER_MARK in name


def base_name(name: str) -> str | None:
    """Return the checkpoint name of a parameter under its peft wrappers; None for an adapter's own."""
    return None if is_adapter(name) else without_wrappers(name)


def adapter_sizes(module: Any) -> AdapterSizes:
    """Count the adapter weights that one token or image patch passes through, for each part of the model.

    Of a mixture of experts, only the share that a token is routed to counts.
    """
    sizes = {"text": 0, "tower": 0, "mergers": 0}
    modules = dict(module.named_modules())
    config = module.get_base_model().config.get_text_config()
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            is_text = not any(f"{tower}." in name for tower in VISION_TOWERS)
            part = "text" if is_text else "mergers" if "merger" in name else "tower"
            experts = getattr(modules[name.partition(ADAPTER_MARK)[0]], "num_experts", 1)
            chosen = getattr(config, "num_experts_per_tok", experts)  # some families have another name for it
            passed = chosen / experts if experts > 1 else 1
            sizes[part] += int(parameter.numel() * passed)
    return AdapterSizes(**sizes)


def add_adapters(
    model: "PreTrainedModel", config: "HFModelConfig", trained: tuple[str, ...] = (), freeze_vision_tower: bool = False
) -> nn.Module:
    """Wrap the model so that only its adapters, and the modules called ``trained``, learn.

    A frozen vision tower gets no adapters.

    Raises: ValueError when ``target_modules`` match nothing, or a tensor that another module uses too.
    """
    from peft import LoraConfig, TaskType

    tower = [rf"(?:.*\.)?(?:{'|'.join(VISION_TOWERS)})\..*"] if freeze_vision_tower else []
    generates = hasattr(model, "prepare_inputs_for_generation")
    never = [rf"(?:.*\.)?{name}" for name in trained] + tower
    if _means_all(config.target_modules):
        never += [re.escape(path) for path in _unfit_layers(model)]
    else:
        _refuse_names(model, config)
    excluded = _excluding(config.exclude_modules, never)

    def adapted(parameters: list[str]) -> nn.Module:
        lora = LoraConfig(
            task_type=TaskType.CAUSAL_LM if generates and not trained else None,
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=_as_list(config.target_modules),
            exclude_modules=excluded,
            target_parameters=parameters or None,
            bias="none",
            base_model_name_or_path=config.path,
        )
        return _wrapped(model, lora)

    try:
        wrapped: Any = adapted([])
        left_out = _left_out(wrapped, config.target_modules, excluded)
        if left_out:
            wrapped.unload()
            wrapped = adapted(left_out)
    except ValueError as error:
        raise WrongInput(
            f"model.target_modules={config.target_modules!r} with model.exclude_modules={config.exclude_modules!r}: "
            f"{one_line(str(error))}: name linear layers of the model, or write all-linear"
        ) from error
    _refuse_tied(wrapped)
    for name, parameter in wrapped.named_parameters():
        if any(f".{module}." in name for module in trained):
            parameter.requires_grad_(True)
    return wrapped


def adapters_of(model: "PreTrainedModel", folder: Path) -> nn.Module:
    """Wrap the model by the configuration in the folder of an adapter.

    Raises: ValueError when it adapts a tensor that another module uses too.
    """
    from peft import LoraConfig

    lora = LoraConfig.from_pretrained(str(folder))
    lora.base_model_name_or_path = model.name_or_path  # peft warns if this name differs
    wrapped = _wrapped(model, lora)
    _refuse_tied(wrapped)
    return wrapped


def _wrapped(model: "PreTrainedModel", lora: "LoraConfig") -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft itself sets these patterns for experts, and then warns that no other layer matches them.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        module: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return module


def _refuse_tied(module: nn.Module) -> None:
    """Refuse adapters on a tensor that two modules use.

    An adapter changes what one module computes. The merged model has one tensor for both, so it would be another model.
    """
    users: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for names in users.values():
        adapted = [name for name in names if len(names) > 1 and f"{ADAPTED}." in name]
        if adapted:
            plain = sorted(without_wrappers(name).rpartition(".")[0] for name in names)
            raise WrongInput(
                f"{' and '.join(plain)} are one tensor (tie_word_embeddings), and an adapter would change one of them "
                "only: the model that trains could not be merged. Leave them out of target_modules (all-linear does)"
            )


def _refuse_names(model: "PreTrainedModel", config: "HFModelConfig") -> None:
    """Refuse a written name of a layer that cannot be adapted, or that no module of the model has.

    peft takes the names of a checkpoint's experts too, which no module has. So a model with experts may have any name.
    """
    targets = _as_list(config.target_modules)
    excluded = _as_list(config.exclude_modules)
    for path in _unfit_layers(model):
        if is_named(targets, path) and not is_named(excluded, path):
            raise WrongInput(
                f"model.target_modules={config.target_modules!r} names {path}, which cannot be adapted: the model "
                "reads its weight without a call of the layer, the layer returns several values, or the balancing loss "
                "of experts is made of its output. Leave it out, or write all-linear, which does"
            )
    modules = dict(model.named_modules())
    if not isinstance(targets, list) or any(_is_expert_class(part) for part in modules.values()):
        return
    for name in targets:
        if not any(is_named([name], path) for path in modules):
            layers = {path.rpartition(".")[2] for path, part in modules.items() if isinstance(part, nn.Linear)}
            raise WrongInput(
                f"model.target_modules={config.target_modules!r} names {name!r}, which the model does not have: its "
                f"linear layers are {', '.join(sorted(layers))}: name some of them, or write all-linear"
            )


def _means_all(targets: "ModuleNames") -> bool:
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def _unfit_layers(model: nn.Module) -> list[str]:
    """Return the layers that an adapter of peft would pass by.

    Some modules read the weight of such a layer instead of calling it, some routers are linear layers with a
    ``forward`` of their own that returns several values, and the balancing loss of Jamba is made of what its plain
    linear routers return, which transformers would record without the adapter.
    """
    recorded = _recorded_routers(model)
    found = []
    for path, module in model.named_modules():
        kind = type(module).__name__
        names = next((names for part, names in _READ_BY_PARENT.items() if part in kind), ())
        found += [f"{path}.{name}" for name in names if hasattr(module, name)]
        returns_more = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        is_recorded = isinstance(module, nn.Linear) and path.rpartition(".")[2] in recorded
        if returns_more or is_recorded or isinstance(module, nn.Conv1d):
            found.append(path)
    return found


def _recorded_routers(model: nn.Module) -> set[str]:
    """Return the names of linear layers whose outputs transformers collects for the balancing loss, if it is on."""
    if not returns_router_logits(getattr(model, "config", None)):
        return set()
    outputs = [getattr(part, "_can_record_outputs", None) or {} for part in model.modules()]
    recorders: list[Any] = [each.get("router_logits") for each in outputs]
    return {each.layer_name for each in recorders if getattr(each, "target_class", None) is nn.Linear}


def _is_expert_class(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _left_out(wrapped: Any, targets: "ModuleNames", excluded: "ModuleNames") -> list[str]:
    """Return the names of the weights that ``target_modules`` select but peft has not adapted.

    peft knows the experts of some families only. In others it takes the projections of dense layers and of shared
    experts for those of routed experts, because checkpoints call all of them ``gate_proj``, ``up_proj``, ``down_proj``.
    """
    modules = dict(wrapped.named_modules())
    means_all = _means_all(targets)
    head = wrapped.get_base_model().get_output_embeddings()
    found: list[str] = []
    others: set[str] = set()
    unfit = set(_unfit_layers(wrapped.get_base_model()))
    for name, parameter in wrapped.named_parameters():
        path, _, kind = name.rpartition(".")
        module = modules[path]
        plain = without_wrappers(path)
        if is_adapter(name) or adapting_layer(modules, name) is not None:
            continue
        if is_named(excluded, plain) and plain not in unfit:
            continue
        is_expert = _is_expert_class(module) and parameter.dim() == 3
        is_linear = isinstance(module, nn.Linear) and kind == "weight" and module is not head and plain not in unfit
        if (means_all and is_expert) or (is_linear and (means_all or is_named(_as_list(targets), plain))):
            found.append(f"{plain}.{kind}")
        elif means_all and parameter.dim() > 1 and module is not head and not isinstance(module, nn.Embedding):
            others.add(re.sub(r"\.\d+\.", ".*.", f"{plain}.{kind}"))
    if others and not (dist.is_initialized() and dist.get_rank()):
        logger.warning("target_modules=all-linear leaves out %s", ", ".join(sorted(others)))
    return found


ModuleNames = str | Sequence[str] | None  # a regular expression, or names


def _as_list(names: ModuleNames) -> str | list[str] | None:
    """Return a pattern, or a list of names; a single name is a list."""
    if isinstance(names, str):
        return [names] if re.fullmatch(r"\w+", names) else names
    return names if names is None else list(names)


def _excluding(exclude: ModuleNames, patterns: list[str]) -> str | list[str] | None:
    """Add patterns to the modules without adapters."""
    if not patterns:
        return _as_list(exclude)
    named = [exclude] if isinstance(exclude, str) else [rf"(?:.*\.)?{re.escape(name)}" for name in exclude or ()]
    return "|".join(f"(?:{pattern})" for pattern in [*named, *patterns])


# Export


def merged_weights(
    module: nn.Module,
    before: Callable[[int], None] | None = None,
    dtypes: Mapping[str, torch.dtype | None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (in-memory name of the base model, whole tensor) with any adapters added in, then the buffers; collective.

    The trained parameters stay as they are. ``before`` is told the bytes of each tensor before it is gathered. A
    parameter that ``dtypes`` gives a smaller dtype is cast to it: before it is gathered or, if it is adapted, after.
    """
    merger = AdapterMerger(module, {name: value for name, value in module.named_parameters() if is_adapter(name)})
    for name, parameter in module.named_parameters():
        plain = base_name(name)
        if plain is None:
            continue
        dtype = smaller_dtype(parameter.dtype, (dtypes or {}).get(name))
        part = parameter.detach()
        if not merger.adapts(name):
            part = part.to(dtype)
        if before is not None:
            before(part.numel() * part.element_size())
        whole = merger.merged(name, full_tensor(part)).to(dtype)
        del part
        yield plain, whole
        del whole
    for name, buffer in stored_buffers(module):
        if (plain := base_name(name)) is not None:
            if before is not None:
                before(buffer.nbytes)
            yield plain, buffer.detach().clone()


def adapting_layer(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """Return the name of the layer that adapts a parameter, by the modules of the wrapped model; None without one.

    A layer around experts adapts one of their parameters, so such layers are nested.
    """
    path, _, parameter = name.rpartition(".")
    while path.endswith(ADAPTED):
        path = path.removesuffix(ADAPTED)
        if getattr(modules[path], "parameter_name", "weight") == parameter:
            return path
    return None


class AdapterMerger:
    """Adds the adapters of a model that peft wraps to the weights that they adapt.

    Args:
        module: the wrapped model, which may be on meta.
        adapters: their tensors under the names of the wrapped model.
    """

    def __init__(self, module: nn.Module, adapters: Mapping[str, Tensor]) -> None:
        self.modules = dict(module.named_modules())
        self.adapters = adapters

    def adapts(self, name: str) -> bool:
        """Whether an adapter changes the weight of this name."""
        return adapting_layer(self.modules, name) is not None

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the whole weight of this name plus its adapter, computed in fp32; the weight itself if it has none.

        Collective where the adapters are sharded.
        """
        path = adapting_layer(self.modules, name)
        if path is None:
            return weight
        layer: Any = self.modules[path]
        delta = self._delta(path, layer).to(weight.device)
        return (weight.float() + layer.scaling[_DEFAULT] * delta).to(weight.dtype)

    def _delta(self, path: str, layer: Any) -> Tensor:
        """Return ``B @ A`` in the layout of the weight."""
        embedding = _DEFAULT in layer.lora_embedding_A
        kind = f"lora_embedding_{{}}.{_DEFAULT}" if embedding else f"lora_{{}}.{_DEFAULT}.weight"
        a, b = (full_tensor(self.adapters[f"{path}.{kind.format(side)}"]).float() for side in "AB")
        experts = getattr(layer, "num_experts", 1)
        if experts > 1:  # peft keeps A as (experts * rank, in) and B as (out, rank * experts)
            of_expert = "ore,eri->eio" if getattr(layer.get_base_layer(), "is_transposed", False) else "ore,eri->eoi"
            return torch.einsum(of_expert, b.view(len(b), -1, experts), a.view(experts, -1, a.shape[-1]))
        delta = b @ a
        return delta.T if embedding or layer.fan_in_fan_out else delta


def adapter_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained tensors under peft's names: adapters, and modules that learn as a whole; collective.

    Raises: RuntimeError when there is no adapter.
    """
    if not has_adapters(module):
        raise RuntimeError("the engine holds no adapter: model.lora_rank is 0")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name.replace(f".{_DEFAULT}", ""), full_tensor(parameter)


def save_adapter(module: Any, folder: Path | None) -> None:
    """Write the adapter in the format of ``PeftModel.from_pretrained``; collective, one rank passes a folder."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in adapter_weights(module) if folder}
    if folder is None:
        return
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = module.peft_config[_DEFAULT].to_dict()
    whole = sorted({name.removeprefix(ADAPTER_PREFIX).split(".")[0] for name in tensors if not is_adapter(name)})
    config |= {"inference_mode": True, "modules_to_save": whole or None}
    content = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # ``sorted`` converts sets of module names
    (folder / "adapter_config.json").write_text(content, encoding="utf-8")
