#!/usr/bin/env bash
# PPO with Megatron-Core: Qwen1.5-MoE-A2.7B-Chat on GSM8K, its experts cut over 4 workers, 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen1.5-MoE-A2.7B-Chat}"
bash "$(dirname "$0")/run_deepseek_math_gsm8k_megatron.sh" \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
    trainer.experiment_name=qwen1.5_moe_a2.7b_gsm8k_megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 \
    "$@"
