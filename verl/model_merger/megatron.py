"""Read a Megatron-Core checkpoint layer by layer, independent of the parallel layout that wrote it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl.errors import CheckpointError
from verl.model_merger.base import HF_FOLDER, BaseMerger, MergeOptions
from verl.models.mcore.families import EXPERT, FUSED_NORMS, find_family, num_experts, outer_rules, text_of, tower_rule
from verl.models.mcore.weights import Rule, stacked
from verl.utils.checkpoint import files, torch_dist
from verl.utils.model import value_model_config

_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True)
class _Source:
    """A Megatron-Core tensor ``key[at]``, and the rule and names of its checkpoint tensors."""

    key: str
    at: tuple[int, ...]
    rule: Rule
    names: tuple[str, ...]


class MegatronMerger(BaseMerger):
    """Reads the weights of one checkpoint that Megatron wrote."""

    layout_name = files.MEGATRON_LAYOUT_NAME

    def __init__(self, options: MergeOptions) -> None:
        if options.merge_lora:
            raise CheckpointError("--merge-lora: Megatron checkpoints hold no adapters")
        super().__init__(options)
        places = (self.folder / torch_dist.TENSORS_FOLDER, self.folder)
        found = next((place for place in places if (place / torch_dist.BACKEND_FILE).is_file()), None)
        if found is None:
            raise CheckpointError(f"{self.folder} holds no tensors: checkpoint.save_contents must name the model")
        self.reader = torch_dist.TorchDistReader(found)
        self.is_value_model = torch_dist.holds_value_head(self.reader)
        if options.is_value_model and not self.is_value_model:
            raise CheckpointError(f"--is-value-model: {self.folder} is not a critic: it has no value head")
        with self.using_config():
            self.sources = self._find_sources()
            if self.is_value_model:
                self.config = value_model_config(self.config)
        self.num_tensors = sum(len(source.names) for source in self.sources)

    @staticmethod
    def needed_files(manifest: files.Manifest) -> list[files.FileRecord]:
        """Return all files but those of random states."""
        return [each for each in manifest.files if not each.name.startswith("rng_")]

    # ---- names

    def _find_sources(self) -> list[_Source]:
        rules = outer_rules(self.config, self.is_value_model, self.config.tie_word_embeddings)
        for name in sorted(self.reader.names()):
            if (rule := tower_rule(self.config, name)) is not None:
                rules[name] = rule
        outer = [_Source(name, (), rule, rule.names) for name, rule in rules.items()]
        embedding = [source for source in outer if source.key.startswith("embedding.")]
        first: dict[tuple[str, ...], _Source] = {}
        for source in (*embedding, *self._layers(), *outer):
            first.setdefault(source.names, source)
        found = list(first.values())
        self._check_names(found)
        return found

    def _layers(self) -> Iterator[_Source]:
        family = find_family(self.config)
        for layer in range(text_of(self.config).num_hidden_layers):
            for name, rule in family.rules_of(self.config, layer).items():
                is_expert = name.startswith(EXPERT)
                for expert in range(num_experts(self.config) or 0) if is_expert else (None,):
                    key, at = self._place(name, layer, expert)
                    names = tuple(each.format(layer=layer, expert=expert) for each in rule.names)
                    yield _Source(key, at, rule, names)

    def _place(self, name: str, layer: int, expert: int | None) -> tuple[str, tuple[int, ...]]:
        """Return the key and index of a tensor; layers, and the experts of a layer, may be stacked under one key."""
        if expert is not None:
            name = _EXPERTS + name.removeprefix(EXPERT)
        inner = () if expert is None else (expert,)
        for each in filter(None, (name, FUSED_NORMS.get(name))):
            for key, at in ((f"decoder.layers.{each}", (layer, *inner)), (f"decoder.layers.{layer}.{each}", inner)):
                if key in self.reader.names():
                    return key, at
        raise CheckpointError(self._other_model(f"lacks decoder.layers.{layer}.{name}"))

    def _check_names(self, sources: Sequence[_Source]) -> None:
        used = {source.key for source in sources}
        names = {name for name in self.reader.names() if not name.startswith(torch_dist.OPTIMIZER_KEYS)}
        if self.config.tie_word_embeddings:
            names.discard(torch_dist.HEAD)
        if used - names:
            raise CheckpointError(self._other_model(f"lacks {min(used - names)}"))
        if names - used:
            raise CheckpointError(self._other_model(f"holds {min(names - used)}, which that model does not have"))
        stacked = [key for key in used if key.startswith("decoder.layers.") and not key.split(".")[2].isdigit()]
        for key in stacked:
            if self.reader.shape(key)[0] != text_of(self.config).num_hidden_layers:
                raise CheckpointError(self._other_model(f"holds {key} of {self.reader.shape(key)[0]} layers"))

    def _other_model(self, problem: str) -> str:
        return f"{self.folder / HF_FOLDER / 'config.json'} is of another model: the checkpoint {problem}"

    # ---- streams

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), tied tensors once."""
        for name, tensor in stacked(self._stored_weights(), num_experts(self.config) or 0):
            yield name, self.cast(name, tensor)

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in their stored dtype, with the experts of a stack one by one."""
        for source in self.sources:
            tensor = self.reader.read(source.key, source.at)
            try:
                parts = source.rule.export([tensor])
            except RuntimeError as error:
                shape = tuple(tensor.shape)
                raise CheckpointError(self._other_model(f"holds {source.key} as {shape} ({error})")) from error
            yield from zip(source.names, parts, strict=True)
