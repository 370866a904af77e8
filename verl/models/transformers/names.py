"""Names of the supported vision-language families. The launching process reads them: this imports no torch."""

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Values of ``model_type`` that are transformers' own; docs/advance/multi_modal.md says how to add one."""
REMOTE_FAMILIES = ("kimi_vl", "minicpmo")
"""Values of ``model_type`` whose code is remote, in the model's repository; see ``verl.models.transformers.remote``."""
SHARED_FAMILIES = (*VISION_FAMILIES, *REMOTE_FAMILIES)
"""Families whose vision tower several workers can share."""
