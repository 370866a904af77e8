#!/usr/bin/env bash
# As test_dapo_7b_math.sh, with LoRA adapters: Qwen2.5-Math-7B on DAPO-Math-17k, 8 nodes of 8 GPUs.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-7b-MATH-lora}"
bash "$(dirname "$0")/test_dapo_7b_math.sh" \
    actor_rollout_ref.model.lora_rank=8 \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=true \
    trainer.experiment_name=DAPO-Qwen2.5-7b-MATH-lora \
    "$@"
