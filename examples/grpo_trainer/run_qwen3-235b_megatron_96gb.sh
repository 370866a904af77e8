#!/usr/bin/env bash
# GRPO with Megatron-Core and the reward of DAPO: Qwen3-235B-A22B on DAPO-Math-17k, TP 4 x PP 8 x EP 8,
# 8 nodes of 8 GPUs with 96 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-235B-A22B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/Qwen3-235B-A22B}"
NNODES="${NNODES:-8}"

max_prompt_length=2048
max_response_length=8192
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${DAPO[@]}" "${DAPO_MATH[@]}" \
    data.max_response_length=$max_response_length \
    data.train_batch_size=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    actor_rollout_ref.ref.megatron.param_offload=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=false \
    +reward_model.reward_kwargs.max_resp_len=$max_response_length \
    trainer.project_name=DAPO \
    trainer.experiment_name=qwen3-235b_megatron_96gb \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.test_freq=10 \
    trainer.save_freq=10 \
    trainer.total_epochs=10 \
    trainer.total_training_steps=200 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
