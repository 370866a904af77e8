#!/usr/bin/env bash
# DAPO in full: Qwen3-8B-Base on DAPO-Math-17k, one node of 16 Ascend devices with 64 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen3-8B-Base-npu}"
max_prompt_length=2048
max_response_length=8192
bash "$(dirname "$0")/run_dapo_qwen2.5_7b_npu.sh" \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    trainer.experiment_name=DAPO-Qwen3-8B-Base-npu \
    "$@"
