#!/usr/bin/env bash
# GRPO with Megatron-Core and the reward of DAPO: Qwen3-30B-A3B on GSM8K and MATH, its experts cut over the workers,
# 4 nodes of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B}"
bash "$(dirname "$0")/run_qwen2-7b_math_megatron.sh" \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=256 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=false \
    +reward_model.reward_kwargs.max_resp_len=1024 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 \
    trainer.experiment_name=qwen3moe-30b_megatron \
    trainer.nnodes=4 \
    "$@"
