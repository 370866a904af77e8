#!/usr/bin/env bash
# The synchronous run to compare with, on FSDP2 and SGLang: Qwen2.5-Math-7B on DAPO-Math-17k, 2 nodes of 8 GPUs that generate and train in turn.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-7b-MATH-fsdp2-sglang-colocate}"
bash "$(dirname "$0")/dapo_7b_math_fsdp2_colocate.sh" \
    actor_rollout_ref.rollout.name=sglang \
    trainer.experiment_name=DAPO-Qwen2.5-7b-MATH-fsdp2-sglang-colocate \
    "$@"
