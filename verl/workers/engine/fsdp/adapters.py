"""LoRA adapters of the FSDP engine, through peft."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.base_config import WrongInput, one_line
from verl.utils.flops_counter import AdapterSizes
from verl.utils.fsdp_utils import ADAPTED, ADAPTER_MARK, ADAPTER_PREFIX, full_tensor, without_wrappers
from verl.utils.model import VISION_TOWERS, stored_buffers

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from verl.workers.config import HFModelConfig

ADAPTER_FOLDER = "lora_adapter"
_DEFAULT = "default"


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
    """Count the weights of the adapters that a token or patch passes, by the part of the model that they adapt."""
    sizes = {"text": 0, "tower": 0, "mergers": 0}
    modules = dict(module.named_modules())
    config = module.get_base_model().config.get_text_config()
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            is_text = not any(f"{tower}." in name for tower in VISION_TOWERS)
            part = "text" if is_text else "mergers" if "merger" in name else "tower"
            experts = getattr(modules[name.partition(ADAPTER_MARK)[0]], "num_experts", 1)
            passed = config.num_experts_per_tok / experts if experts > 1 else 1
            sizes[part] += int(parameter.numel() * passed)
    return AdapterSizes(**sizes)


def add_adapters(
    model: "PreTrainedModel", config: "HFModelConfig", trained: tuple[str, ...] = (), freeze_vision_tower: bool = False
) -> nn.Module:
    """Wrap the model so that only its adapters, and the modules called ``trained``, learn.

    A frozen vision tower gets no adapters.

    Raises: ValueError when ``target_modules`` match nothing.
    """
    from peft import LoraConfig, TaskType

    tower = [rf"(?:.*\.)?(?:{'|'.join(VISION_TOWERS)})\..*"] if freeze_vision_tower else []
    generates = hasattr(model, "prepare_inputs_for_generation")
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM if generates and not trained else None,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_as_list(config.target_modules),
        exclude_modules=_excluding(config.exclude_modules, [rf"(?:.*\.)?{name}" for name in trained] + tower),
        bias="none",
        base_model_name_or_path=config.path,
    )
    try:
        wrapped = _wrapped(model, lora)
    except ValueError as error:
        raise WrongInput(
            f"model.target_modules={config.target_modules!r} with model.exclude_modules={config.exclude_modules!r}: "
            f"{one_line(str(error))}: name linear layers of the model, or write all-linear"
        ) from error
    for name, parameter in wrapped.named_parameters():
        if any(f".{module}." in name for module in trained):
            parameter.requires_grad_(True)
    return wrapped


def adapters_of(model: "PreTrainedModel", folder: Path) -> nn.Module:
    """Wrap the model as the configuration in the folder of an adapter says."""
    from peft import LoraConfig

    lora = LoraConfig.from_pretrained(str(folder))
    lora.base_model_name_or_path = model.name_or_path  # peft warns of another one
    return _wrapped(model, lora)


def _wrapped(model: "PreTrainedModel", lora: "LoraConfig") -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft sets these patterns itself for experts, and then looks for them among the other layers.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        module: nn.Module = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return module


ModuleNames = str | Sequence[str] | None  # a regular expression, or names


def _as_list(names: ModuleNames) -> str | list[str] | None:
    return names if names is None or isinstance(names, str) else list(names)


def _excluding(exclude: ModuleNames, patterns: list[str]) -> str | list[str] | None:
    """Add patterns to the modules without adapters."""
    if not patterns:
        return _as_list(exclude)
    named = [exclude] if isinstance(exclude, str) else [rf"(?:.*\.)?{re.escape(name)}" for name in exclude or ()]
    return "|".join(f"(?:{pattern})" for pattern in [*named, *patterns])


# Export


def merged_weights(module: nn.Module, before: Callable[[int], None] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (in-memory name of the base model, whole tensor) with any adapters added in, then the buffers; collective.

    The trained parameters stay as they are. ``before`` is told the bytes of each tensor before it is gathered.
    """
    merger = AdapterMerger(module, {name: value for name, value in module.named_parameters() if is_adapter(name)})
    for name, parameter in module.named_parameters():
        plain = base_name(name)
        if plain is None:
            continue
        if before is not None:
            before(parameter.numel() * parameter.element_size())
        whole = merger.merged(name, full_tensor(parameter))
        yield plain, whole
        del whole
    for name, buffer in stored_buffers(module):
        if (plain := base_name(name)) is not None:
            if before is not None:
                before(buffer.nbytes)
            yield plain, buffer.detach().clone()


class AdapterMerger:
    """Adds the adapters of a model that peft wraps to the weights that they adapt.

    Args:
        module: the wrapped model, which may be on meta.
        adapters: their tensors under the names of the wrapped model.
    """

    def __init__(self, module: nn.Module, adapters: Mapping[str, Tensor]) -> None:
        self.modules = dict(module.named_modules())
        self.adapters = adapters

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the whole weight of this name plus its adapter, computed in fp32; itself where it has none.

        Collective where the adapters are sharded.
        """
        path = self._adapted_by(name)
        if path is None:
            return weight
        layer: Any = self.modules[path]
        delta = self._delta(path, layer).to(weight.device)
        return (weight.float() + layer.scaling[_DEFAULT] * delta).to(weight.dtype)

    def _adapted_by(self, name: str) -> str | None:
        """Return the name of the layer that adapts a parameter.

        A layer around experts adapts one of their parameters, so such layers are nested.
        """
        path, _, parameter = name.rpartition(".")
        while path.endswith(ADAPTED):
            path = path.removesuffix(ADAPTED)
            if getattr(self.modules[path], "parameter_name", "weight") == parameter:
                return path
        return None

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
    """Write the adapter as ``PeftModel.from_pretrained`` reads it; collective, and one rank has a folder."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in adapter_weights(module) if folder}
    if folder is None:
        return
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = module.peft_config[_DEFAULT].to_dict()
    whole = sorted({name.removeprefix(ADAPTER_PREFIX).split(".")[0] for name in tensors if not is_adapter(name)})
    config |= {"inference_mode": True, "modules_to_save": whole or None}
    content = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets of module names
    (folder / "adapter_config.json").write_text(content, encoding="utf-8")
