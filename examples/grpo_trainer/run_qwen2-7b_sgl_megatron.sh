#!/usr/bin/env bash
# GRPO with Megatron-Core and SGLang: Qwen2-7B-Instruct on GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/run_qwen2-7b_math_megatron.sh" \
    actor_rollout_ref.rollout.name=sglang \
    trainer.experiment_name=qwen2-7b_sgl_megatron \
    "$@"
