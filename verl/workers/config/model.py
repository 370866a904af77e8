"""The Hugging Face model of a worker: its folder, the changes to it, and the parts that are loaded."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omegaconf import OmegaConf

from verl.base_config import MOST_INTEGER, BaseConfig, ConfigError, Violation, matches, one_line, setting, type_hints
from verl.models.transformers.names import SGLANG_KERNEL_FAMILIES, SGLANG_VISION_FAMILIES
from verl.utils.fs import unreadable_kind
from verl.utils.hub import cached_folder, hub_problems, model_folder
from verl.utils.json_types import Json, mapping_at
from verl.workers.config.overrides import Fields, changed_config, config_changes, flat_overrides
from verl.workers.config.tokenizer_files import TOKENIZER_SUFFIXES, tokenizer_problems

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from verl.utils.checkpoint.hf_export import SourceFiles

T = TypeVar("T")
READ_SUFFIXES = (*TOKENIZER_SUFFIXES, ".json", ".safetensors", ".bin", ".jinja", ".txt")
"""Endings of the files that a model is loaded from."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
TRAINED_ROUTER = {"topk_method": "greedy"}
"""Changes of Kimi-VL's ``text_config`` in training, which its rollout engine needs as well."""
_CORRECT = "correct it, or copy the model again"
_DTYPES = (
    "auto",
    "float32",
    "float",
    "bfloat16",
    "float16",
    "half",
    "float64",
    "double",
    "float8_e4m3fn",
    "float8_e5m2",
)


@dataclass
class BaseModelConfig(BaseConfig):
    """The keys of every model node."""

    path: str = setting("~/models/deepseek-llm-7b-chat", "folder or hub id of the model")
    tokenizer_path: str | None = setting(None, "folder or hub id of its tokenizer; null: path")
    override_config: dict[str, Any] = setting({}, "fields of config.json to change")
    external_lib: str | list[str] | None = setting(None, "modules that workers import first")
    trust_remote_code: bool = setting(False, "code from the model's repository may run")
    use_shm: bool = setting(False, "load from a copy in shared memory")
    enable_gradient_checkpointing: bool = setting(True, "compute activations again in the backward pass")

    def as_model_config(self) -> "HFModelConfig":
        """Return the node from which an engine builds the model."""
        shared = type_hints(HFModelConfig).keys() - {"_target_"}
        return HFModelConfig(**{name: value for name, value in self.items() if name in shared})


class Loaded(Generic[T]):
    """A field that is loaded when it is first read, unless it was given."""

    def __init__(self, load: Callable[["HFModelConfig"], T]) -> None:
        self._load = load

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: "HFModelConfig | None", owner: type | None = None) -> T | None:
        if instance is None:  # the dataclass asks for the default of the field
            return None
        state = instance.__dict__
        if state.get(self._name) is None and self._name not in state.setdefault("_loaded", set()):
            state[self._name] = self._load(instance)
            state["_loaded"].add(self._name)  # None is a result too: a text model has no processor
        return state[self._name]

    def __set__(self, instance: "HFModelConfig", value: T) -> None:
        instance.__dict__[self._name] = value


def _local(key: str) -> Callable[["HFModelConfig"], str]:
    """Return the loader of the local folder for ``key``, or for ``path`` if ``key`` is null."""

    def load(config: "HFModelConfig") -> str:
        from verl.utils.fs import copy_to_local

        path = config[key]
        if key != "path" and path in (None, config.path):
            return config.local_path
        if not path or path == "???":
            expected = "is missing: write a folder that save_pretrained wrote, or a hub id"
            raise ConfigError([Violation(f"model.{key}", path, expected)])
        _refuse(f"model.{key}", path, [*path_problems(path), *hub_problems(path)])
        return copy_to_local(model_folder(os.path.expanduser(path).rstrip("/")), use_shm=config.use_shm)

    return load


def _refuse(key: str, value: Json, problems: Iterable[str]) -> None:
    """Raise ConfigError if there is a problem."""
    found = [Violation(key, value, problem) for problem in problems]
    if found:
        raise ConfigError(found)


def _tokenizer(config: "HFModelConfig") -> "PreTrainedTokenizerBase | None":
    from verl.utils.tokenizer import hf_tokenizer

    if not config.load_tokenizer:
        return None
    _refuse("model.tokenizer_path", config.tokenizer_path, tokenizer_problems(config.local_tokenizer_path))
    tokenizer = hf_tokenizer(config.local_tokenizer_path, trust_remote_code=config.trust_remote_code)
    if config.custom_chat_template is not None:
        tokenizer.chat_template = config.custom_chat_template
    return tokenizer


def _processor(config: "HFModelConfig") -> "ProcessorMixin | None":
    from verl.utils.tokenizer import hf_processor

    if not config.load_tokenizer:
        return None
    processor = hf_processor(config.local_tokenizer_path, trust_remote_code=config.trust_remote_code)
    if processor is not None and config.custom_chat_template is not None:
        processor.chat_template = config.custom_chat_template
    return processor


def _generation_config(config: "HFModelConfig") -> "GenerationConfig":
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(config.local_hf_config_path)
    except OSError:  # the file is optional
        return GenerationConfig.from_model_config(config.hf_config)


def _base_config(config: "HFModelConfig") -> "PretrainedConfig":
    """Return the configuration of the files, without ``override_config``."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    options = {name: value for name, value in config.override_config.items() if name == "attn_implementation"}
    try:
        hf_config = AutoConfig.from_pretrained(
            config.local_hf_config_path, trust_remote_code=config.trust_remote_code, **options
        )
        if config.trust_remote_code and type(hf_config).__module__.startswith("vllm."):
            # vLLM registers its own classes, whose fields differ from those that the model's code reads.
            reference = hf_config.auto_map["AutoConfig"]
            own_class: Any = get_class_from_dynamic_module(reference, config.local_hf_config_path)
            hf_config = own_class.from_pretrained(config.local_hf_config_path, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        where = config.hf_config_path or config.path
        reason = one_line(str(error), 400)
        expected = f"no usable config.json: {reason}. Write a folder that save_pretrained wrote, or a hub id"
        raise ConfigError([Violation("model.path", where, expected)]) from error
    return hf_config


def _changed_config(config: "HFModelConfig", base: "PretrainedConfig") -> "PretrainedConfig":
    if not flat_overrides(config.override_config):
        return base
    content = read_config_json(config.local_hf_config_path)
    options = {name: value for name, value in config.override_config.items() if name == "attn_implementation"}
    return changed_config(base, content, config.override_config, **options)


def _hf_config(config: "HFModelConfig") -> "PretrainedConfig":
    hf_config = _changed_config(config, _base_config(config))
    if config.load_tokenizer:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if name not in flat_overrides(config.override_config):
                setattr(hf_config, name, getattr(config.tokenizer, name))
    if hf_config.model_type == "kimi_vl":  # its code refuses to train with the default routing
        hf_config.text_config.topk_method = TRAINED_ROUTER["topk_method"]
    return hf_config


def _architectures(config: "HFModelConfig") -> list[str]:
    architectures = list(config.hf_config.architectures or [])
    if len(architectures) != 1:
        expected = f"its config.json must name one architecture, it names {architectures}"
        raise ConfigError([Violation("model.path", config.path, expected)])
    return architectures


@dataclass(repr=False, eq=False)
class HFModelConfig(BaseModelConfig):
    """A Hugging Face model. What is read from its folder is loaded on first use, so that a node can be checked
    without loading anything.

    Raises: ConfigError when a path is missing or holds no usable file.
    """

    _mutable_fields = frozenset(
        {
            "hf_config_path",
            "tokenizer_path",
            "hf_config",
            "generation_config",
            "tokenizer",
            "processor",
            "local_path",
            "architectures",
            "local_hf_config_path",
            "local_tokenizer_path",
        }
    )

    hf_config_path: str | None = setting(None, "folder or hub id of its config.json; null: path")
    custom_chat_template: str | None = setting(None, "Jinja text instead of the chat template")
    enable_activation_offload: bool = setting(False, "keep activations in CPU memory")
    use_remove_padding: bool = setting(False, "pack sequences instead of padding them")
    use_prefix_sharing: bool = setting(False, "compute tokens that rows begin with once")
    lora_rank: int = setting(0, "rank of the adapters; 0: none", at_least=0, at_most=8192)
    lora_alpha: int = setting(16, "scale of the adapters, divided by their rank")
    target_modules: str | list[str] = setting("all-linear", "modules with adapters")
    exclude_modules: str | list[str] | None = setting(None, "modules without adapters")
    use_liger: bool = setting(False, "use the kernels of liger-kernel")
    use_fused_kernels: bool = setting(False, "compute log-probs in the head, without logits")
    fused_kernel_options: dict[str, Any] = setting({"impl_backend": "torch"}, "implementation of the fused head")
    load_tokenizer: bool = setting(True, "load tokenizer and processor")
    local_path: Any = Loaded(_local("path"))
    local_hf_config_path: Any = Loaded(_local("hf_config_path"))
    local_tokenizer_path: Any = Loaded(_local("tokenizer_path"))
    tokenizer: Any = Loaded(_tokenizer)
    processor: Any = Loaded(_processor)
    hf_config: Any = Loaded(_hf_config)
    generation_config: Any = Loaded(_generation_config)
    architectures: Any = Loaded(_architectures)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.external_lib is not None:
            from verl.utils.import_utils import import_external_libs

            import_external_libs(self.external_lib)
        self._following_path = [name for name in ("hf_config_path", "tokenizer_path") if not self[name]]
        for name in self._following_path:
            setattr(self, name, self.path)

    def rules(self) -> Iterator[Violation]:
        """Yield adapters without a scale, and kernels that do not exist."""
        if self.lora_rank > 0 and self.lora_alpha <= 0:
            yield Violation("lora_alpha", self.lora_alpha, "must be above 0")
        backend = self.fused_kernel_options.get("impl_backend", "torch")
        if backend not in ("torch", "triton"):
            yield Violation("fused_kernel_options.impl_backend", backend, "must be torch or triton")

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Whether input and output embeddings are one tensor."""
        return bool(getattr(self.hf_config, "tie_word_embeddings", False))

    @property
    def eos_token_id(self) -> int | list[int]:
        """The tokens that end a response: those of the generation config, else the tokenizer's."""
        eos = self.generation_config.eos_token_id
        return self.tokenizer.eos_token_id if eos is None else eos

    @property
    def pad_token_id(self) -> int:
        """The token that fills prompts and responses."""
        return self.tokenizer.pad_token_id

    def config_changes(self) -> dict[str, Json]:
        """Return the fields that ``override_config`` changes in the configuration of the files, by node."""
        base = _base_config(self)
        return config_changes(base.to_dict(), _changed_config(self, base).to_dict())

    def source_files(self) -> "SourceFiles | None":
        """Return the model's files that a checkpoint copies, without changed ones; None if they are not local."""
        from verl.utils.checkpoint.hf_export import SourceFiles

        folders = [cached_folder(path) for path in (self.local_hf_config_path, self.local_tokenizer_path)]
        if folders[0] is None or not os.path.isfile(os.path.join(folders[0], "config.json")):
            return None
        return SourceFiles(
            config=Path(folders[0]),
            tokenizer=Path(folders[1] or folders[0]),
            read=_base_config(self),
            overridden=frozenset(flat_overrides(self.override_config)),
            chat_template=self.custom_chat_template,
        )

    def changed(self, changes: Mapping[str, Json]) -> "HFModelConfig":
        """Return a copy of the node with changed values, mappings merged; the copy loads its parts again."""
        loaded = {name for name, value in vars(HFModelConfig).items() if isinstance(value, Loaded)}
        values = {name: self[name] for name in self if name not in loaded}
        values |= {name: None for name in self._following_path if values[name] == self.path}
        merged: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(values), OmegaConf.create(dict(changes))))
        return HFModelConfig(**merged)

    def get_processor(self) -> "ProcessorMixin | PreTrainedTokenizerBase":
        """Return the processor of a multi-modal model, else the tokenizer."""
        return self.processor if self.processor is not None else self.tokenizer

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={self.path!r})"


def path_problems(path: str) -> Iterator[str]:
    """Yield why ``path`` cannot be a model: a missing folder, or one without a readable config.json."""
    expanded = os.path.expanduser(path)
    if "://" in path:
        return
    if not path:
        yield "must be a folder that save_pretrained wrote, or a hub id such as Qwen/Qwen2.5-0.5B"
        return
    if not os.path.isdir(expanded):
        local = expanded.startswith(("/", ".")) or path.startswith("~") or path.count("/") > 1
        if os.path.isfile(expanded):
            yield "is a file: write the folder that holds config.json and the weights"
        elif local:
            yield "no such folder: write a folder that save_pretrained wrote, or a hub id such as Qwen/Qwen2.5-0.5B"
        return
    file = os.path.join(expanded, "config.json")
    names = sorted(name for name in os.listdir(expanded) if name.endswith(READ_SUFFIXES))
    odd = [
        f"{os.path.join(expanded, name)} {kind}"
        for name in names
        if (kind := unreadable_kind(os.path.join(expanded, name)))
    ]
    if odd:
        yield f"{odd[0]}: copy the model again"
        return
    if not os.path.isfile(file):
        found = ", ".join(sorted(os.listdir(expanded))[:5]) or "nothing"
        yield f"has no config.json, it holds {found}: write a folder that save_pretrained wrote"
        return
    try:
        config = read_config_json(expanded)
    except ValueError as error:
        yield f"{file} is not readable JSON ({error}): copy the model again"
        return
    if not config.get("auto_map") and not is_known_type(config.get("model_type")):
        yield (
            f"{file} has model_type={json.dumps(config.get('model_type'))}, which the installed transformers does not "
            "know: correct it, or install a version that does"
        )
        return
    for name in ("text_config", "vision_config", "rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), Mapping | None):
            yield f"{file} has {name}={one_line(json.dumps(config[name]))}, which must be an object: {_CORRECT}"
            return
    text = config.get("text_config")
    for problem in [*field_problems(config), *(field_problems(text) if isinstance(text, Mapping) else ())]:
        yield f"{file} has {problem}: {_CORRECT}"


def field_problems(config: Mapping[str, Json]) -> Iterator[str]:
    """Yield the sizes and dtypes of a ``config.json`` that no model can have."""
    given = {name: config[name] for name in _SIZES if not isinstance(config.get(name), list | None)}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST_INTEGER:
            yield f"{name}={one_line(json.dumps(value))}, which must be an integer of 1 or more"
            return
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        yield f"num_key_value_heads={shared}, which must divide num_attention_heads={heads}"
    dropout = config.get("attention_dropout")
    if dropout is not None and not (isinstance(dropout, int | float) and matches(dropout, float) and 0 <= dropout < 1):
        yield f"attention_dropout={one_line(json.dumps(dropout))}, which must be a number from 0 to below 1"
    for name in ("torch_dtype", "dtype"):
        dtype = config.get(name)
        if not isinstance(dtype, Mapping | None) and str(dtype).removeprefix("torch.") not in _DTYPES:
            yield f"{name}={one_line(json.dumps(dtype))}, which must be one of float32, bfloat16, float16"


def architecture_problem(config: Mapping[str, Json]) -> Iterator[str]:
    """Yield why a generation engine cannot choose the model class by its ``config.json``."""
    names = config.get("architectures")
    if names is None or config.get("auto_map"):
        return
    given = f"its config.json has architectures={one_line(json.dumps(names))}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        yield f"{given}: name one class, such as Qwen2ForCausalLM"
    elif not _names_in(("modeling_auto.py",), names[0]):
        yield f"{given}, which the installed transformers does not know: correct it, or install a version that does"


def is_known_type(model_type: Json) -> bool:
    """Whether transformers has a model of this type."""
    return _names_in(("auto_mappings.py", "configuration_auto.py"), model_type)


def is_known_tokenizer(class_name: Json) -> bool:
    """Whether transformers has a tokenizer class of this name, or its slow or fast variant."""
    plain = str(class_name).removesuffix("Fast")
    return any(_names_in(("tokenization_auto.py",), name) for name in (plain, f"{plain}Fast"))


def _names_in(modules: Iterable[str], name: Json) -> bool:
    """Whether transformers' ``auto`` package names a type; searches the source, since importing takes seconds."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return True
    auto = Path(found.submodule_search_locations[0], "models", "auto")
    files = [auto / module for module in modules if (auto / module).is_file()]
    return not files or any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)


def positions_of(hf_config: Mapping[str, Json]) -> int | None:
    """Return the number of positions of a model, None if it is unknown or stretched by RoPE scaling."""
    text = mapping_at(hf_config, "text_config") or hf_config
    positions = text.get("max_position_embeddings")
    rope = mapping_at(text, "rope_scaling") or mapping_at(text, "rope_parameters")
    kinds = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    return positions if isinstance(positions, int) and not any(each.get("factor") for each in kinds) else None


def read_config_json(path: str) -> dict[str, Json]:
    """Return ``config.json`` of a local model folder; empty for a hub id.

    Raises: ValueError when the file is truncated or not an object.
    """
    file = os.path.join(os.path.expanduser(path), "config.json")
    if not os.path.isfile(file):
        return {}
    with open(file, encoding="utf-8") as stream:
        try:
            content = json.load(stream)
        except RecursionError:
            raise ValueError("nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def quantized_problem(hf_config: Mapping[str, Json]) -> Iterator[str]:
    """Yield why a model with quantized weights cannot be trained, from its ``config.json``."""
    how = hf_config.get("quantization_config") or mapping_at(hf_config, "text_config").get("quantization_config")
    if how:
        method = how.get("quant_method", "?") if isinstance(how, Mapping) else how
        yield (
            f"its weights are quantized (quantization_config.quant_method={method}), and quantized weights are not "
            "trained: name a folder with its weights in bfloat16, and without quantization_config"
        )


def sglang_problem(family: Json, sees_images: bool, lacks_kernels: bool) -> str | None:
    """Return why SGLang cannot generate with a family of models; None if it can, or if that is not known.

    Args: ``family`` is the ``model_type``; ``lacks_kernels`` tells a CPU without SGLang's kernel package.
    """
    if sees_images and family not in SGLANG_VISION_FAMILIES:
        known = ", ".join(SGLANG_VISION_FAMILIES)
        return f"takes no vision-language model of model_type {family!r}, but those of {known}: write vllm"
    if lacks_kernels and family in SGLANG_KERNEL_FAMILIES:
        return f"runs model_type {family!r} by kernels that a CPU does not have: write vllm"
    return None


class ConfigFields(SimpleNamespace):
    """The fields of a ``config.json`` as attributes, read as transformers reads those of decoders, without importing
    it; what the file leaves out is absent but for ``hidden_act``.
    """

    hidden_act = "silu"

    def __init__(self, content: Mapping[str, Json]) -> None:
        fields = {name: value for name, value in content.items() if name != "original_max_position_embeddings"}
        rope = fields.pop("rope_scaling", None) or fields.get("rope_parameters")
        if fields.get("model_type") != "mixtral" and not fields.get("use_sliding_window"):
            fields["sliding_window"] = None  # except for mixtral, ``use_sliding_window`` switches the window on
        super().__init__(**fields | {"rope_parameters": dict(rope) if isinstance(rope, Mapping) else {}})
        self.standardize_rope_params()
        if content.get("partial_rotary_factor") is not None:
            self.rope_parameters.setdefault("partial_rotary_factor", content["partial_rotary_factor"])
        if "original_max_position_embeddings" in content:  # after the RoPE parameters, like transformers
            self.original_max_position_embeddings = content["original_max_position_embeddings"]

    @property
    def rope_scaling(self) -> Fields:
        """The older name of ``rope_parameters``."""
        return self.rope_parameters

    @rope_scaling.setter
    def rope_scaling(self, value: Fields) -> None:
        self.rope_parameters = value

    def standardize_rope_params(self) -> None:
        """Name the type, and the positions of pretraining where the type needs them."""
        rope = self.rope_parameters
        if not isinstance(rope, dict) or not rope:
            return
        kind = rope.setdefault("rope_type", rope.get("type", "default"))
        if kind in ("llama3", "yarn", "longrope"):
            length = getattr(self, "original_max_position_embeddings", None)
            if length is not None:  # transformers prefers this field to the one in the RoPE parameters
                rope["original_max_position_embeddings"] = length
            elif hasattr(self, "max_position_embeddings"):
                rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
