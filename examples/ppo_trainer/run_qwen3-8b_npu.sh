#!/usr/bin/env bash
# PPO with a critic: each sequence shared by two devices (Ulysses), Qwen3-8B on GSM8K, one node of 8 Ascend devices.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"
bash "$(dirname "$0")/run_deepseek7b_llm.sh" \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    critic.ppo_micro_batch_size_per_gpu=8 \
    critic.ulysses_sequence_parallel_size=2 \
    critic.model.fsdp_config.param_offload=true \
    critic.model.fsdp_config.optimizer_offload=true \
    trainer.experiment_name=qwen3-8b_npu \
    trainer.device=npu \
    "$@"
