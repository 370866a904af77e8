#!/usr/bin/env bash
# GRPO with the reward, limits and loss of DAPO on Megatron-Core: DeepSeek-V3 (671B) on DAPO-Math-17k, 16 nodes of 8 GPUs with 96 GB.
# Weights in bfloat16: convert the fp8 weights of the hub first, and name their folder in MODEL_PATH.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-deepseek-ai/DeepSeek-V3-0324-BF16}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-DeepSeek-V3-671B}"
export NNODES="${NNODES:-16}"
max_prompt_length=2048
max_response_length=8192
bash "$(dirname "$0")/test_dapo_7b_math_megatron.sh" \
    data.train_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    trainer.experiment_name=DAPO-DeepSeek-V3-671B \
    "$@"
