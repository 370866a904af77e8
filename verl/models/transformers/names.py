"""Names of attention and of vision-language families. The launching process reads them: this imports no torch."""

PACKED = "verl_varlen"
"""The attention of packed sequences, under transformers' ``attn_implementation``."""
LENGTH_ROPES = ("dynamic", "longrope")
"""Types of RoPE scaling whose frequencies depend on the length of a row; see ``verl.models.transformers.rope``."""
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Values of ``model_type`` that are transformers' own; docs/advance/multi_modal.md says how to add one."""
SGLANG_VISION_FAMILIES = VISION_FAMILIES
"""Families whose images and videos SGLang takes, and scores as transformers does."""
SGLANG_KERNEL_FAMILIES = (
    *("falcon_h1", "falcon_mamba", "granitemoehybrid", "jet_nemotron", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zaya"),
    *("gemma2", "gpt_oss", "grok-1", "qwen2_moe", "vaultgemma"),
)
"""Families that SGLang runs by kernels only: layers of states or short convolutions, gated shared experts, attention
with sinks or with a cap of its logits, which SGLang's attention for a CPU drops."""
REMOTE_FAMILIES = ("kimi_vl", "minicpmo")
"""Values of ``model_type`` whose code is remote, in the model's repository; see ``verl.models.transformers.remote``."""
SHARED_FAMILIES = (*VISION_FAMILIES, *REMOTE_FAMILIES)
"""Families whose vision tower several workers can share."""
