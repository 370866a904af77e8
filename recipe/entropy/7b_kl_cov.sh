#!/usr/bin/env bash
# KL-Cov: Qwen2.5-7B on DAPO-Math-17k, 4 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/entropy/klcov-qwen2.5-7b}"
export NNODES="${NNODES:-4}"
max_token_len_per_gpu=30720
bash "$(dirname "$0")/32b_kl_cov.sh" \
    actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.002 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$max_token_len_per_gpu \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$max_token_len_per_gpu \
    actor_rollout_ref.actor.fsdp_config.param_offload=false \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false \
    trainer.experiment_name=klcov-qwen2.5-7b \
    "$@"
