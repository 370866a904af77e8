#!/usr/bin/env bash
# GRPO with Megatron-Core: Qwen2.5-7B-Instruct on GSM8K and MATH, cut in 4 for training and in 2 for generation, 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
bash "$(dirname "$0")/run_qwen2-7b_math_megatron.sh" \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    trainer.experiment_name=qwen2_5-7b_math_megatron_diff_tp \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    "$@"
