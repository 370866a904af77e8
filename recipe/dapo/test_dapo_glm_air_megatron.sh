#!/usr/bin/env bash
# GRPO with the reward, limits and loss of DAPO on Megatron-Core: GLM-4.5-Air (106B, 12B active) on DAPO-Math-17k, 8 nodes of 8 GPUs.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-zai-org/GLM-4.5-Air-Base}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-GLM-4.5-Air}"
max_prompt_length=2048
max_response_length=8192
bash "$(dirname "$0")/test_dapo_7b_math_megatron.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    trainer.experiment_name=DAPO-GLM-4.5-Air \
    "$@"
