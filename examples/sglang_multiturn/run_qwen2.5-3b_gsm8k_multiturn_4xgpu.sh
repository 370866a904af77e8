#!/usr/bin/env bash
# GRPO with a tool that scores answers: Qwen2.5-3B-Instruct on GSM8K, 4 GPUs, parameters and optimizer in CPU memory while others need the GPUs.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
bash "$(dirname "$0")/run_qwen3-4b_gsm8k_multiturn.sh" \
    data.max_response_length=1024 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    trainer.experiment_name=qwen2.5-3b_4xgpu \
    trainer.n_gpus_per_node=4 \
    "$@"
