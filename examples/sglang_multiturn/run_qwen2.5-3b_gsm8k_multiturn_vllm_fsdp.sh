#!/usr/bin/env bash
# GRPO with a tool that scores answers, on vLLM and FSDP: Qwen2.5-3B-Instruct on GSM8K, one node of 8 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
bash "$(dirname "$0")/run_qwen3-4b_gsm8k_multiturn.sh" vllm \
    data.max_response_length=1024 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_torch_compile=false \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.mode=async \
    trainer.device=npu \
    trainer.experiment_name=qwen2.5-3b_vllm_fsdp \
    "$@"
