#!/usr/bin/env bash
# GSPO with a mixture of experts on Megatron-Core, experts over 8 GPUs: Qwen3-30B-A3B-Base on DAPO-Math-17k, 4 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/GSPO/GSPO-Qwen3-30B-A3B-Base}"
export NNODES="${NNODES:-4}"
export ENGINE="${ROLLOUT_NAME:-vllm}"
bash "$(dirname "$0")/../dapo/test_dapo_7b_math_megatron.sh" \
    data.train_batch_size=256 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=0.0003 \
    actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.rollout.mode="${ROLLOUT_MODE:-async}" \
    trainer.project_name=verl_gspo \
    trainer.experiment_name=gspo_qwen3_30b_a3b_ep \
    "$@"
