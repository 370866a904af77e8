#!/usr/bin/env bash
# DAPO without dynamic sampling: Qwen2.5-32B on DAPO-Math-17k, 16 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

HERE="$(dirname "$0")"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-32B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-wo-DS-Qwen2.5-32B}"
NNODES="${NNODES:-16}"
RAY_ADDRESS="${RAY_ADDRESS:-http://localhost:8265}"
WORKING_DIR="${WORKING_DIR:-$PWD}"
RUNTIME_ENV="${RUNTIME_ENV:-$WORKING_DIR/verl/trainer/runtime_env.yaml}"
export RAY_ADDRESS

max_prompt_length=2048
max_response_length=20480
source "$HERE/../../examples/settings.sh"

ray job submit --no-wait --runtime-env="$RUNTIME_ENV" --working-dir "$WORKING_DIR" -- \
    python3 -m "recipe.$(basename "$HERE").main_dapo" "${DAPO[@]}" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    data.max_response_length=$max_response_length \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=4096 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.project_name=DAPO \
    trainer.experiment_name=DAPO-wo-DS-Qwen2.5-32B \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.total_epochs=1 \
    "$@"
