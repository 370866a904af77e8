"""Import path of the established verl interface for the loaders of experts."""

from verl.compat.expert_loaders import patch_vllm_moe_model_weight_loader as patch_vllm_moe_model_weight_loader
