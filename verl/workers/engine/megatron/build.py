"""Build the chunks of the model on this rank, and the wrapper that reduces their gradients.

Their weights come from files of this node, from a worker of another node, or from a seed.
"""

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor, nn

from verl.base_config import ConfigError, Violation, as_yaml
from verl.errors import CheckpointError, ModelWeightsError, WrongInput
from verl.models.mcore.bridge import Bridge, needs_bridge
from verl.models.mcore.families import HEAD_NAMES, find_family, num_experts, text_of
from verl.models.mcore.gpt.build import (
    attach_fused_head,
    attach_picker,
    hf_to_mcore_config,
    init_mcore_model,
    named_parameters,
    parts,
)
from verl.models.mcore.gpt.layers import attach_paths
from verl.models.mcore.gpt.vision import takes_axes
from verl.models.mcore.weights import is_stack
from verl.models.mcore_limits import default_implementation
from verl.models.transformers.own_loss import loss_problems
from verl.models.transformers.prefix_sharing import mcore_sharing_problems, sharing_problems
from verl.utils.checkpoint.torch_dist import TENSORS_FOLDER, TorchDistReader, holds_value_head, vocabulary_problem
from verl.utils.fs import copy_to_local, own_folder
from verl.utils.json_types import Json
from verl.utils.kernel.linear_cross_entropy import backend_of
from verl.utils.megatron.dist_checkpointing import chunk_names, load_dist_checkpointing, sharded_weights, tensor_names
from verl.workers.engine.background_load import Values, fill, place
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.weights import DTYPES, SafetensorsReader, draw_tensor, head_aliases, refuse_not_finite

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

    from verl.models.mcore.weights import ReadPart
    from verl.workers.config import HFModelConfig, McoreEngineConfig

T = TypeVar("T")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of weight files, which workers do not send whole."""
_KEYS_OF_THE_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
"""Keys of ``megatron`` that are also fields of Megatron-Core's configuration."""
_OF_TRANSFORMER_ENGINE = {"layernorm", "moe_act"}
"""Modules that only the layers of Transformer Engine can recompute."""


def model_dtype(config: "McoreEngineConfig", device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations; the default is bf16 on accelerators and fp32 on the CPU."""
    return DTYPES[config.dtype or ("fp32" if device.type == "cpu" else "bf16")]


@dataclass
class ModelBuilder:
    """Builds the module of one engine, step by step."""

    model_config: "HFModelConfig"
    engine_config: "McoreEngineConfig"
    layout: Layout
    is_value_model: bool
    makes_head: bool
    load_weight: bool = True
    freeze_vision_tower: bool = False

    def __post_init__(self) -> None:
        self.hf_config = self.model_config.hf_config
        self.text = text_of(self.hf_config)
        self.path: str = self.model_config.local_path
        self.bridge: Bridge | None = None

    def build(self) -> list[nn.Module]:
        """Return the chunks, whose weights ``load`` brings.

        Raises: ValueError naming the file, tensor or key that is wrong.
        """
        if needs_bridge(self.hf_config, self.engine_config.use_mbridge):
            return self._build_bridged()
        self._refuse()
        config = self.transformer_config()
        count = self.layout.virtual_stages
        tied = self.model_config.share_embeddings_and_output_weights
        options = self.model_config.override_config.get("moe_config") or {}
        chunks = [
            init_mcore_model(
                config,
                self.hf_config,
                share_embeddings_and_output_weights=tied,
                value=self.is_value_model,
                freeze_moe_router=bool(options.get("freeze_moe_router")),
                vp_stage=stage if count > 1 else None,
            )
            for stage in range(count)
        ]
        for chunk in chunks:
            chunk.to(self.layout.device)  # routers are constructed on the host
            if self.model_config.use_prefix_sharing and not takes_axes(chunk):
                attach_paths(chunk)
            if self.fuses_head:
                backend = self.model_config.fused_kernel_options["impl_backend"]
                attach_fused_head(chunk, self.text.vocab_size, self.layout.tp_group, backend)
            if self.freeze_vision_tower and hasattr(chunk, "visual"):
                chunk.visual.requires_grad_(False)
        return chunks

    def _build_bridged(self) -> list[nn.Module]:
        """Let mbridge build the chunks of a model that verl's tables lack."""
        self._refuse_options()
        if self.is_value_model or not self.load_weight or self.freeze_vision_tower:
            wrong = "load_weight=false" if not self.load_weight else "freeze_vision_tower=true"
            wrong = "a critic or reward model" if self.is_value_model else wrong
            name = ", ".join(self.hf_config.architectures or ["none"])
            raise WrongInput(
                f"megatron.use_mbridge=true: {wrong} of architecture {name} is not supported: use strategy=fsdp"
            )
        dtype = model_dtype(self.engine_config, self.layout.device)
        self.bridge = Bridge(self.hf_config, dtype, self._overrides())
        chunks = self.bridge.build()
        for chunk in chunks:
            chunk.to(self.layout.device)
            chunk.config.finalize_model_grads_func = finish_gradients
            attach_picker(chunk, self.layout.tp_group)
            if self.fuses_head:
                backend = self.model_config.fused_kernel_options["impl_backend"]
                attach_fused_head(chunk, self.text.vocab_size, self.layout.tp_group, backend)
        return chunks

    @property
    def fuses_head(self) -> bool:
        """Whether the head scores tokens without making logits; a value head makes none anyway."""
        return not self.is_value_model and bool(self.model_config.use_fused_kernels)

    def _refuse_options(self) -> None:
        if self.fuses_head:
            backend_of(self.model_config.fused_kernel_options["impl_backend"], self.layout.device)
        for name in ("lora_rank", "use_liger", "enable_activation_offload"):
            if value := self.model_config[name]:
                raise WrongInput(f"model.{name}={as_yaml(value)} is not supported with strategy=megatron")
        self._refuse_losses()
        if self.model_config.use_prefix_sharing:
            self._refuse_sharing()

    def _refuse_losses(self) -> None:
        """Raise ConfigError for a policy whose own loss has a term that Megatron-Core does not compute."""
        if self.is_value_model or self.engine_config.forward_only:
            return
        problems = loss_problems(self.hf_config.to_dict(), "megatron")
        found = [Violation(f"model.override_config.{name}", value, fault) for name, value, fault in problems]
        if found:
            raise ConfigError(found)

    def _refuse_sharing(self) -> None:
        """Raise ConfigError for a model or a layout that cannot compute shared tokens once."""
        config = self.engine_config
        fields = self.hf_config.to_dict()
        bridged = needs_bridge(self.hf_config, config.use_mbridge)
        overrides = config.override_transformer_config
        trains = not config.forward_only
        kind = overrides.get("transformer_impl") or default_implementation(self.layout.device.type)
        problems = [*sharing_problems(fields, trains)]
        problems += mcore_sharing_problems(fields, config.context_parallel_size, bridged, kind, overrides, trains)
        if problems:
            raise ConfigError([Violation("model.use_prefix_sharing", True, problem) for problem in problems])

    def _refuse(self) -> None:
        self._refuse_options()
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(self.text, name)
            if heads % self.layout.tp_size:
                raise WrongInput(
                    f"megatron.tensor_model_parallel_size={self.layout.tp_size} must divide {name}={heads} of the model"
                )
        experts = num_experts(self.hf_config)
        ep_size = self.engine_config.expert_model_parallel_size
        if ep_size > 1 and (not experts or experts % ep_size):
            raise WrongInput(
                f"megatron.expert_model_parallel_size={ep_size} must divide the {experts or 0} experts of the model"
            )
        if experts and self.layout.tp_size > 1 and not self.engine_config.sequence_parallel:
            raise WrongInput("megatron.sequence_parallel=false: models with experts and tensor parallelism need true")
        self._refuse_vision()
        stages = self.layout.pp_size * self.layout.virtual_stages
        uneven = any("pipeline" in key for key in self.engine_config.override_transformer_config)
        if self.text.num_hidden_layers % stages and not uneven:
            raise WrongInput(
                f"megatron.pipeline_model_parallel_size={self.layout.pp_size} x {self.layout.virtual_stages} virtual "
                f"stages must divide the {self.text.num_hidden_layers} layers of the model"
            )

    def _refuse_vision(self) -> None:
        sees = find_family(self.hf_config).vision is not None
        if self.freeze_vision_tower and not sees:
            name = ", ".join(self.hf_config.architectures or ["none"])
            raise WrongInput(f"freeze_vision_tower=true needs a model with a vision tower, not {name}")
        if sees and self.layout.tp_size > 1 and not self.engine_config.sequence_parallel:
            raise WrongInput(
                "megatron.sequence_parallel=false: vision-language models and tensor parallelism need true, with which "
                "the gradient of the vision tower is summed over the ranks"
            )

    def transformer_config(self) -> "TransformerConfig":
        """Return the configuration of Megatron-Core for this layout."""
        config = self.engine_config
        values = {key: getattr(config, key) for key in _KEYS_OF_THE_LAYOUT}
        dtype = model_dtype(config, self.layout.device)
        built = hf_to_mcore_config(self.hf_config, dtype, **(values | self._overrides()))
        built.finalize_model_grads_func = finish_gradients
        return built

    def _overrides(self) -> dict[str, Json]:
        """Return the fields of Megatron-Core's configuration that this run sets, apart from its layout."""
        config = self.engine_config
        values: dict[str, Json] = {}
        # Megatron-Core's default exchange passes wrong activations between virtual stages; see McoreEngineConfig.
        if self.layout.virtual_stages > 1:
            values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        overrides = {key: value for key, value in config.override_transformer_config.items() if value is not None}
        if self.model_config.enable_gradient_checkpointing:
            overrides.setdefault("recompute_granularity", "full")
        granularity = overrides.get("recompute_granularity")
        if granularity == "full":
            values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        if granularity != "selective":
            overrides.pop("recompute_modules", None)
        needing = sorted(_OF_TRANSFORMER_ENGINE & set(overrides.get("recompute_modules") or ()))
        if needing and overrides.get("transformer_impl", default_implementation(self.layout.device.type)) == "local":
            raise WrongInput(
                f"megatron.override_transformer_config.recompute_modules names {needing}, which needs Transformer "
                "Engine: leave it out"
            )
        if overrides.get("deallocate_pipeline_outputs") and self.layout.device.type == "cpu":
            raise WrongInput(
                "megatron.override_transformer_config.deallocate_pipeline_outputs=true must be false on CPU workers: "
                "gloo still reads the buffer, and the next stage would receive garbage"
            )
        return values | overrides

    # ---- weights

    @property
    def reads_alone(self) -> bool:
        """Whether ``load`` needs no other rank, and so may run in a thread."""
        shares_files = self.engine_config.share_model_files and self.layout.world_size > 1
        return self.bridge is None and not self.engine_config.use_dist_checkpointing and not shares_files

    def load(self, chunks: Sequence[nn.Module], at_once: bool = True) -> None:
        """Bring the weights of the chunks; collective unless ``reads_alone``; only then may ``at_once`` be false.

        Raises: ModelWeightsError naming the file, or the tensor that is missing or of the wrong shape.
        """
        if not self.load_weight:
            self._fill(chunks, new_weights(self.hf_config, self.engine_config.seed), {}, at_once)
        elif self.engine_config.use_dist_checkpointing:
            self.load_distributed(chunks, str(self.engine_config.dist_checkpointing_path))
        elif self.bridge is not None:
            self.bridge.load(chunks, self.path)
        else:
            self.load_files(chunks, at_once)

    def load_files(self, chunks: Sequence[nn.Module], at_once: bool = True) -> None:
        """Fill the parameters of this rank with its parts of the checkpoint.

        Only these parts are read. With ``share_model_files`` they may come from another worker; the call is then
        collective.

        Raises: ModelWeightsError naming the file, or the tensor that is missing or of the wrong shape.
        """
        shared: SharedWeights | None = None
        reader: SafetensorsReader | None = None
        if self.engine_config.share_model_files and self.layout.world_size > 1:
            shared = SharedWeights(self.path, self.layout.device)
            reader = shared.reader
        elif SafetensorsReader.serves(self.path):
            reader = SafetensorsReader(self.path)
        heads: Mapping[str, str] = {}
        if shared is not None and shared.is_needed:
            stored = shared.stored
            heads = self._heads(stored, lambda name: stored[name].shape)
            shapes = {name: each.shape for name, each in stored.items() if is_stack(name)}
            shared.exchange(lambda: self._fill(chunks, self._reading(shared.want, stored, heads), shapes))
            if reader is None:
                self._fill(chunks, self._reading(shared.receive, stored, heads), shapes)
                _raise_first(shared.problems)
                return
        elif reader is not None:
            heads = self._heads(reader.names(), reader.shape)
        if reader is None:
            raise ModelWeightsError(
                f"model.path={self.path} holds no model.safetensors, nor an index of several, on the node of rank "
                f"{self.layout.rank}: strategy=megatron reads safetensors only, each worker its own parts; save the "
                "model with save_pretrained where every node can read it, or write megatron.share_model_files=true if "
                "some nodes have it"
            )
        shapes = {name: reader.shape(name) for name in reader.names() if is_stack(name)}
        self._fill(chunks, self._reading(reader.read, reader.names(), heads), shapes, at_once)

    def _heads(self, names: Collection[str], shape_of: Callable[[str], Sequence[int]] | None) -> Mapping[str, str]:
        """Return the stored names of the value head that differ from the model's names."""
        if not self.is_value_model:
            return {}
        source = f"model.path={self.model_config.path}"
        return head_aliases(source, self.path, names, shape_of, self.makes_head, self.layout.rank == 0)

    def _fill(
        self, chunks: Sequence[nn.Module], read: "ReadPart", shapes: Mapping[str, Sequence[int]], at_once: bool = True
    ) -> None:
        memory = (parameter for chunk in chunks for parameter in chunk.parameters())
        fill(memory, partial(self._values, chunks, read, shapes), at_once)

    def _values(self, chunks: Sequence[nn.Module], read: "ReadPart", shapes: Mapping[str, Sequence[int]]) -> Values:
        for value, parameter in parts(chunks, self.hf_config, self.is_value_model, read, shapes):
            yield from place(value, parameter)

    def _reading(self, read_stored: "ReadPart", names: Collection[str], heads: Mapping[str, str]) -> "ReadPart":
        """Return a function that reads a part of a stored tensor, or initialises a part of a new head."""

        def read(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
            stored = heads.get(name, name)
            if stored in names:
                return read_stored(stored, shape, part)
            # Heads for sequence classification have no bias.
            if name in HEAD_NAMES and (self.makes_head or name.endswith("bias")):
                return draw_tensor(name, torch.Size(shape), self.engine_config.seed, self.hf_config)
            raise ModelWeightsError(
                f"the checkpoint lacks {name!r}: model.path must hold the whole model of its config.json"
            )

        return read

    def load_distributed(self, chunks: Sequence[nn.Module], path: str) -> None:
        """Fill the parameters from a folder in the torch_dist format, or a checkpoint with one, whatever its layout.

        Each rank reads its own parts, and makes a new value head if the folder holds a language model. Collective.

        Raises: ModelWeightsError naming the folder, and the tensor that it lacks or that has another shape.
        """
        folder = Path(copy_to_local(path))
        folder = folder / TENSORS_FOLDER if (folder / TENSORS_FOLDER).is_dir() else folder
        state = sharded_weights(chunks)
        try:
            reader = TorchDistReader(folder)
            if self.is_value_model and self.makes_head and not holds_value_head(reader):
                for part in state.values():
                    for key in [key for key in part if key.startswith("output_layer.")]:
                        del part[key]
                self._make_heads(chunks)
                head_aliases(f"megatron.dist_checkpointing_path={path}", "", (), None, True, self.layout.rank == 0)
            if lacking := tensor_names(state) - reader.names():
                raise CheckpointError(f"it lacks {min(lacking)}")
            if problem := vocabulary_problem(reader, self.text.vocab_size):
                raise CheckpointError(problem)
            loaded = load_dist_checkpointing(state, folder)
        except CheckpointError as error:
            raise ModelWeightsError(
                f"megatron.dist_checkpointing_path={path}: {error}. It must hold the model of model.path, which "
                "scripts/converter_hf_to_mcore.py writes"
            ) from error
        for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
            for key, tensor in loaded[name].items():
                if isinstance(tensor, Tensor):
                    refuse_not_finite(key, tensor, str(folder))
            chunk.load_state_dict(loaded[name], strict=False)

    def _make_heads(self, chunks: Sequence[nn.Module]) -> None:
        with torch.no_grad():
            for chunk in chunks:
                for named in named_parameters(chunk, self.hf_config, self.is_value_model):
                    name = named.checkpoint_names[0]
                    if name in HEAD_NAMES:
                        shape = named.parameter.shape
                        named.parameter.copy_(draw_tensor(name, shape, self.engine_config.seed, self.hf_config))


# Gradients


def wrap(chunks: list[Any], config: "McoreEngineConfig") -> list[nn.Module]:
    """Wrap the chunks with gradient buffers and the reduction over data-parallel ranks.

    Gradients are reduced in fp32 even if the weights are bf16: adding many small terms in bf16 loses them.

    Raises: ValueError for a key that Megatron-Core does not have.
    """
    values: dict[str, Json] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": False,
        "check_for_nan_in_grad": False,  # the engine skips and counts such a step
    } | dict(config.override_ddp_config)
    unknown = sorted(values.keys() - DistributedDataParallelConfig.__dataclass_fields__.keys())
    if unknown:
        raise WrongInput(
            f"megatron.override_ddp_config has unknown keys {unknown}: write fields of megatron-core's "
            "DistributedDataParallelConfig"
        )
    settings = DistributedDataParallelConfig(**values)
    wrapped = [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=at > 0)
        for at, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:  # all micro-batches but the last accumulate without communication
        waits = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return wrapped


def gather_weights(chunks: Sequence[Any]) -> None:
    """Gather the weights that an optimizer step left to the next forward (``overlap_param_gather``); collective."""
    for chunk in chunks:
        if not getattr(chunk, "use_forward_hook", False):
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def finish_gradients(chunks: list[nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce the gradients over all ranks that hold a parameter.

    Megatron-Core would also divide by ``num_tokens``. The loss is already divided by its unit counts.
    """
    finalize_model_grads(chunks, None, **kwargs)


# Weights from elsewhere


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PartRequest(NamedTuple):
    """A part of a tensor that a worker requests."""

    name: str
    part: tuple[slice, ...]


def new_weights(hf_config: "PretrainedConfig", seed: int) -> "ReadPart":
    """Return a function that draws each tensor, the same on every layout: norms are 1, biases 0, matrices normal."""

    def make(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        if len(shape) == 1 and not name.endswith("bias"):  # a norm
            return torch.ones(*shape, dtype=torch.float32)[part]
        return draw_tensor(name, torch.Size(shape), seed, hf_config)[part]

    return make


# The folder of a model, without its weights


def share_folder(config: "HFModelConfig") -> None:
    """Send configuration and tokenizer of ``model.path`` to workers whose node lacks the folder; collective.

    They write them to a temporary folder, which becomes their ``local_path``.
    """
    folder = os.path.expanduser(config.path).rstrip("/")
    here = _gathered(os.path.isfile(os.path.join(folder, "config.json")))
    if all(here) or not any(here):  # no worker has the folder of a hub id
        return
    first = here.index(True)
    box = [_small_files(folder) if dist.get_rank() == first else {}]
    dist.broadcast_object_list(box, src=first)
    if not here[dist.get_rank()]:
        config.local_path = _written(box[0])


def _small_files(folder: str) -> dict[str, bytes]:
    files = (path for path in sorted(Path(folder).iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in files if not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))}


def _written(files: dict[str, bytes]) -> str:
    """Write files to a folder named by their digest, so that the workers of a node share it."""
    digest = hashlib.blake2b(digest_size=12)
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    folder = own_folder(os.path.join(tempfile.gettempdir(), f"verl-model-{digest.hexdigest()}"))
    for name, content in files.items():
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            file.write(content)
        os.replace(file.name, os.path.join(folder, name))
    return folder


# Its weights


def _gathered(value: T) -> list[T]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise ModelWeightsError(problem)


class SharedWeights:
    """Sends parts of tensors to workers without files, each from a worker that has files; collective.

    Workers without files first list the parts that they want, in the order in which they will read them. Parts are
    sent one by one, so that no worker holds more than its own weights and one part.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        """Find the workers that have files. Raises: ModelWeightsError on all workers if one cannot read its files."""
        self._device = device
        self._rank = dist.get_rank()
        self.reader: SafetensorsReader | None = None
        self.stored: dict[str, Stored] = {}
        problem = None
        if SafetensorsReader.serves(folder):
            try:
                self.reader = SafetensorsReader(folder)
                self.stored = {name: Stored(*each) for name, each in self.reader.describe().items()}
            except ModelWeightsError as error:
                problem = str(error)
        found = _gathered((self.reader is not None, problem))
        _raise_first(each for _, each in found)
        self._owners = [rank for rank, (has, _) in enumerate(found) if has]
        self._wanting = [rank for rank, (has, _) in enumerate(found) if not has]
        self._requests: deque[PartRequest] = deque()
        self.problems: list[str] = []
        if self.is_needed:
            box = [self.stored]
            dist.broadcast_object_list(box, src=self._owners[0])
            self.stored = box[0]

    @property
    def is_needed(self) -> bool:
        """Whether some workers have files and others have none."""
        return bool(self._wanting and self._owners)

    def exchange(self, plan: Callable[[], None]) -> None:
        """Collect the requests that ``plan`` makes by ``want``, and send the parts that other workers request.

        Raises: on all workers, the error that ``plan`` raises on one.
        """
        problem = None
        if self.reader is None:
            try:
                plan()
            except ValueError as error:
                problem = str(error)
        asked = _gathered((list(self._requests), problem))
        _raise_first(each for _, each in asked)
        if self.reader is not None:
            mine = [rank for rank in self._wanting if self._source_of(rank) == self._rank]
            # Every waiting worker is told about an unreadable part before this worker raises.
            _raise_first([self._send(request, rank) for rank in mine for request in asked[rank][0]])

    def want(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Request a part, and return a meta tensor of its shape. Raises: ModelWeightsError for another shape."""
        stored = self.stored[name]
        if stored.shape != tuple(shape):
            raise ModelWeightsError(
                f"tensor {name!r} has shape {stored.shape}, the model of its config.json needs {tuple(shape)}"
            )
        self._requests.append(PartRequest(name, part))
        return torch.empty(_shape_of(stored, part), dtype=stored.dtype, device="meta")

    def receive(self, name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        """Return the next requested part, or zeros if its owner cannot read it; the reason is added to ``problems``."""
        request = self._requests.popleft()
        assert request == PartRequest(name, part), f"{request} was requested, not {name} {part}"
        stored = self.stored[name]
        source = self._source_of(self._rank)
        length = torch.zeros(1, dtype=torch.long, device=self._device)
        dist.recv(length, src=source)
        content = torch.empty(abs(int(length)), dtype=torch.uint8, device=self._device)
        if len(content):
            dist.recv(content, src=source)
        if length < 0:
            self.problems.append(f"rank {source}, which has the files: {bytes(content.tolist()).decode()}")
            return torch.zeros(_shape_of(stored, part), dtype=stored.dtype)
        return content.view(stored.dtype).view(_shape_of(stored, part))

    def _source_of(self, rank: int) -> int:
        return self._owners[self._wanting.index(rank) % len(self._owners)]

    def _send(self, request: PartRequest, rank: int) -> str | None:
        """Send a length and that many bytes: the part or, with a negative length, an error message.

        Returns: the error message, or None.
        """
        assert self.reader is not None
        problem = None
        try:
            part = self.reader.read(request.name, self.stored[request.name].shape, request.part)
            content = part.contiguous().view(-1).view(torch.uint8)
        except ModelWeightsError as error:
            problem = str(error)
            content = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8)
        length = len(content) if problem is None else -len(content)
        dist.send(torch.tensor([length], device=self._device), dst=rank)
        if len(content):
            dist.send(content.to(self._device), dst=rank)
        return problem


def _shape_of(stored: Stored, part: tuple[slice, ...]) -> tuple[int, ...]:
    cut = [len(range(*piece.indices(size))) for piece, size in zip(part, stored.shape, strict=False)]
    return (*cut, *stored.shape[len(cut) :])
