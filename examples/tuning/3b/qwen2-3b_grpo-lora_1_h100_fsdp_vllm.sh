#!/usr/bin/env bash
# GRPO with LoRA: Qwen2.5-3B-Instruct on GSM8K, one H100 with 80 GB, FSDP and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
bash "$(dirname "$0")/../7b/qwen2-7b_grpo-lora_1_h100_fsdp_vllm.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.actor.fsdp_config.param_offload=false \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false \
    trainer.experiment_name=qwen2-3b_grpo-lora_1_h100_fsdp_vllm \
    "$@"
