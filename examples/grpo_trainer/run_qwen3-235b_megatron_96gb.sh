#!/usr/bin/env bash
# GRPO with Megatron-Core and the reward of DAPO: Qwen3-235B-A22B on DAPO-Math-17k, TP 4 x PP 8 x EP 8,
# 8 nodes of 8 GPUs with 96 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-235B-A22B}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/Qwen3-235B-A22B}"
export NNODES="${NNODES:-8}"
bash "$(dirname "$0")/run_deepseek671b_math_megatron_96gb.sh" \
    data.train_batch_size=512 \
    data.trust_remote_code=false \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11 \
    actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    trainer.experiment_name=qwen3-235b_megatron_96gb \
    "$@"
