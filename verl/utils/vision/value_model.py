"""Value models of vision-language architectures; transformers has no token classification class for them."""

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import TokenClassifierOutput


class VisionValueModel:
    """Build a vision-language model with one number per token; it has the two constructors of an auto class."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        self._class = _with_score(AutoModelForImageTextToText._model_mapping[type(hf_config)])

    def from_config(self, config: PretrainedConfig, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return the model with new weights."""
        return self._class._from_config(config, **options)

    def from_pretrained(self, path: str, **options: Any) -> PreTrainedModel:
        """Return the model with the weights of a checkpoint, which may be that of a policy."""
        return self._class.from_pretrained(path, **options)


@cache
def _with_score(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of an architecture with a head ``score`` that gives one number per token."""

    class VisionTokenClassification(architecture):  # type: ignore[misc]
        _tied_weights_keys = None

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels)

        def get_output_embeddings(self) -> None:
            """Return None: there is no language-model head."""

        def forward(
            self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
        ) -> TokenClassifierOutput:
            """Score every token: logits (b, L, 1)."""
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)[0]
            return TokenClassifierOutput(logits=self.score(hidden))

    name = architecture.__name__.replace("ForConditionalGeneration", "") + "ForTokenClassification"
    VisionTokenClassification.__name__ = VisionTokenClassification.__qualname__ = name
    renames = get_checkpoint_conversion_mapping(architecture.__name__)
    if renames is not None:  # transformers maps names in files to names in memory by class name
        register_checkpoint_conversion_mapping(name, renames, overwrite=True)
    return VisionTokenClassification
