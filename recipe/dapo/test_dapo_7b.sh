#!/usr/bin/env bash
# DAPO: Qwen2.5-Math-7B on DAPO-Math-17k, 8 nodes of 8 GPUs.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-7B-Math-Test}"
export NNODES="${NNODES:-8}"
max_prompt_length=1024
max_response_length=2048
bash "$(dirname "$0")/run_dapo_qwen2.5_32b.sh" \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    reward_model.overlong_buffer.len=512 \
    actor_rollout_ref.actor.fsdp_config.param_offload=false \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 \
    trainer.experiment_name=DAPO-Qwen2.5-7B-Math-Test \
    "$@"
