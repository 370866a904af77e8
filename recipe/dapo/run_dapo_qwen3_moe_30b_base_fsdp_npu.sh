#!/usr/bin/env bash
# DAPO in full, with a mixture of experts: Qwen3-30B-A3B-Base on DAPO-Math-17k, one node of 16 Ascend devices with 64 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

HERE="$(dirname "$0")"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen3-MoE-30B-FSDP-npu}"
NNODES="${NNODES:-1}"
SP_SIZE="${SP_SIZE:-16}"

max_prompt_length=2048
max_response_length=8192
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_dapo" "${DAPO[@]}" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.max_response_length=$max_response_length \
    data.train_batch_size=256 \
    data.gen_batch_size=768 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) / SP_SIZE + 1))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP_SIZE" \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) / SP_SIZE + 1))" \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=4096 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.project_name=DAPO \
    trainer.experiment_name=DAPO-Qwen3-MoE-30B-FSDP-npu \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.device=npu \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes="$NNODES" \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.total_epochs=1 \
    "$@"
