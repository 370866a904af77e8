#!/usr/bin/env bash
# GRPO with Megatron-Core and the reward of DAPO: DeepSeek-V3-0324 (671B) on DAPO-Math-17k, PP 12 x EP 8,
# 12 nodes of 8 GPUs with 96 GB.
# The hub holds the weights in FP8: MODEL_PATH must name a copy in bf16.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-deepseek-ai/DeepSeek-V3-0324-BF16}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DeepSeek-V3-0324}"
export NNODES="${NNODES:-12}"
bash "$(dirname "$0")/../../recipe/dapo/test_dapo_7b_math_megatron.sh" \
    data.train_batch_size=480 \
    data.trust_remote_code=true \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=12 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 \
    actor_rollout_ref.ref.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 \
    trainer.experiment_name=deepseek671b_math_megatron_96gb \
    "$@"
