#!/usr/bin/env bash
# GRPO with Megatron-Core and the reward of DAPO: Qwen3-30B-A3B on GSM8K and MATH, its experts cut over the workers,
# 4 nodes of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B}"

max_response_length=1024
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${RUN[@]}" "${GSM8K_MATH[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=256 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=false \
    +reward_model.reward_kwargs.max_resp_len=$max_response_length \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=qwen3moe-30b_megatron \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=4 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
