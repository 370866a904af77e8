#!/usr/bin/env bash
# GMPO on the data and with the reward of DAPO: Qwen2.5-Math-7B on DAPO-Math-17k, 8 nodes of 8 GPUs.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/GMPO/GMPO-Qwen2.5-7b-MATH}"
NNODES="${NNODES:-8}"

max_prompt_length=2048
max_response_length=8192
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${DAPO[@]}" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    data.max_response_length=$max_response_length \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.4 \
    actor_rollout_ref.actor.clip_ratio_high=0.4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=32 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=false \
    +reward_model.reward_kwargs.max_resp_len=$max_response_length \
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
    trainer.project_name=GMPO \
    trainer.experiment_name=GMPO-Qwen2.5-7b-MATH \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.total_epochs=10 \
    trainer.total_training_steps=200 \
    "$@"
