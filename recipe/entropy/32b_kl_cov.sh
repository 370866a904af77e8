#!/usr/bin/env bash
# KL-Cov: Qwen2.5-32B on DAPO-Math-17k, 8 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

HERE="$(dirname "$0")"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-32B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/entropy/klcov-qwen2.5-32b}"
NNODES="${NNODES:-8}"
RAY_ADDRESS="${RAY_ADDRESS:-http://localhost:8265}"
WORKING_DIR="${WORKING_DIR:-$PWD}"
RUNTIME_ENV="${RUNTIME_ENV:-$WORKING_DIR/verl/trainer/runtime_env.yaml}"
export RAY_ADDRESS

max_prompt_length=2048
max_response_length=8192
max_token_len_per_gpu=20480
source "$HERE/../../examples/settings.sh"

ray job submit --no-wait --runtime-env="$RUNTIME_ENV" --working-dir "$WORKING_DIR" -- \
    python3 -m "recipe.$(basename "$HERE").main_entropy" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.max_response_length=$max_response_length \
    data.train_batch_size=256 \
    data.gen_batch_size=768 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov \
    actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1 \
    actor_rollout_ref.actor.optim.lr=5e-7 \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$max_token_len_per_gpu \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=sync \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$max_token_len_per_gpu \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    reward_model.reward_manager=dapo \
    trainer.experiment_name=klcov-qwen2.5-32b \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.val_before_train=false \
    trainer.test_freq=4 \
    trainer.save_freq=32 \
    trainer.total_epochs=1000 \
    "$@"
