"""Import path of GLM-4V's positions in the established verl interface, see ``verl.utils.vision.positions``."""

from verl.models.transformers.qwen2_vl import get_rope_index as get_rope_index
