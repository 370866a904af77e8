"""Read an FSDP checkpoint: join the shards of all ranks."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.model_merger.base import HF_FOLDER, BaseMerger, MergeOptions, load_config
from verl.model_merger.shards import ShardedState, check_checkpoint
from verl.utils.checkpoint.files import LAYOUT_NAME, CheckpointError
from verl.utils.fsdp_utils import parameters_on_meta
from verl.utils.model import get_hf_auto_model_class, get_value_model_class
from verl.workers.engine.fsdp.adapters import ADAPTER_FOLDER, base_name, is_adapter
from verl.workers.engine.fsdp.weights import checkpoint_names
from verl.workers.engine.weights import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PEFT = "base_model.model."


class FSDPMerger(BaseMerger):
    """Reads the weights of one checkpoint. Raises: CheckpointError if it is incomplete or does not match its config."""

    def __init__(self, options: MergeOptions) -> None:
        super().__init__(options)
        self.state = ShardedState(self.folder, check_checkpoint(self.folder))
        self.read_dtypes(LAYOUT_NAME)
        self.places = {plain: key for key in self.state if (plain := base_name(key)) is not None}
        self.has_adapter = any(is_adapter(key) for key in self.state)
        self.adapter_config = self._adapter_config() if self.has_adapter else {}
        self.model = self._empty_model()
        self.config = self.model.config
        self.num_tensors = len(dict(self.model.named_parameters()))

    def _adapter_config(self) -> dict[str, Any]:
        path = self.folder / ADAPTER_FOLDER / "adapter_config.json"
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            content["lora_alpha"], content["r"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}, which holds the scale of the adapters, cannot be read: {error}") from error
        return content

    def _empty_model(self) -> "PreTrainedModel":
        """Build the model without storage, for its parameter names, order, ties and conversions."""
        config = load_config(self.folder, self.options.trust_remote_code)
        if self.options.tie_word_embedding:
            config.tie_word_embeddings = True
        is_value = any(name.startswith(HEAD) for name in self.places)
        if self.options.is_value_model and not is_value:
            raise CheckpointError(f"--is-value-model: {self.folder} is not a critic: it has no tensor {HEAD}weight")
        auto_class = get_value_model_class(config) if is_value else get_hf_auto_model_class(config)
        with parameters_on_meta():
            model: PreTrainedModel = auto_class.from_config(config, trust_remote_code=self.options.trust_remote_code)
        model.config.architectures = [type(model).__name__]
        self._check_names(model)
        return model

    def _check_names(self, model: "PreTrainedModel") -> None:
        every = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in model.named_parameters()}
        missing = [name for name in shapes if name not in self.places]
        unexpected = [name for name in self.places if name not in every and name not in model.state_dict()]
        if missing or unexpected:
            problem = f"the checkpoint lacks {missing[0]}" if missing else f"the model has no parameter {unexpected[0]}"
            raise CheckpointError(f"{self.folder / HF_FOLDER / 'config.json'} is of another model: {problem}")
        for name, shape in shapes.items():
            found = self.state.first[self.places[name]].shape
            if found != shape:
                raise CheckpointError(f"{name} has shape {tuple(found)}, but config.json needs {tuple(shape)}")

    # ---- streams

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), tied tensors once."""
        yield from ((name, self.cast(name, tensor)) for name, tensor in checkpoint_names(self.model, self._in_memory()))

    def _in_memory(self) -> Iterator[tuple[str, Tensor]]:
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        names = dict(self.model.named_parameters())
        buffers = [name for name in self.model.state_dict() if name not in tied and name in self.places]
        for name in [*names, *buffers]:
            key = self.places[name]
            whole = self.state[key]
            yield name, self._merged(key, whole) if self.options.merge_lora else whole

    def _merged(self, key: str, weight: Tensor) -> Tensor:
        """Merge a weight's adapter into it, with the formula that the engine uses for generation."""
        layer = key.removesuffix(".base_layer.weight")
        if layer == key:
            return weight
        embedding = f"{layer}.lora_embedding_A.default" in self.state
        ends = ("lora_embedding_A.default", "lora_embedding_B.default")
        a, b = (self.state[f"{layer}.{end}"] for end in (ends if embedding else _LINEAR))
        delta = b.float() @ a.float()
        if embedding or self.adapter_config.get("fan_in_fan_out"):
            delta = delta.T
        scaling = self.adapter_config["lora_alpha"] / self.adapter_config["r"]
        return (weight.float() + scaling * delta).to(weight.dtype)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained adapter tensors under peft's names."""
        whole = tuple(f"{_PEFT}{name}." for name in self.adapter_config.get("modules_to_save") or ())
        for key in self.state:
            if is_adapter(key) or key.startswith(whole):
                yield key.replace(".default", ""), self.cast(key, self.state[key])


_LINEAR = ("lora_A.default.weight", "lora_B.default.weight")
