#!/usr/bin/env bash
# As test_dapo_7b_math.sh, with a mixture of experts on FSDP: Qwen3-30B-A3B-Base on DAPO-Math-17k, 8 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen3-30B-A3B-Base-MATH}"
max_prompt_length=2048
max_response_length=20480
bash "$(dirname "$0")/test_dapo_7b_math.sh" \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    reward_model.reward_kwargs.max_resp_len=$max_response_length \
    trainer.experiment_name=DAPO-Qwen3-30B-A3B-Base-MATH \
    trainer.save_freq=-1 \
    trainer.total_training_steps=300 \
    "$@"
