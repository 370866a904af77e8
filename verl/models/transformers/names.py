"""Names of the supported vision-language families. The launching process reads them: this imports no torch."""

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Values of ``model_type``; docs/advance/multi_modal.md says how to add one."""
