#!/usr/bin/env bash
# As test_dapo_qwen3_30b_math.sh, on one node of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen3-30B-A3B-Base-MATH-one-node}"
export NNODES="${NNODES:-1}"
max_prompt_length=2048
max_response_length=8192
bash "$(dirname "$0")/test_dapo_7b_math.sh" \
    data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    trainer.experiment_name=DAPO-Qwen3-30B-A3B-Base-MATH-one-node \
    trainer.save_freq=-1 \
    trainer.total_training_steps=300 \
    "$@"
