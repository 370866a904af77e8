#!/usr/bin/env bash
# GRPO with LoRA: Qwen2.5-32B-Instruct on GSM8K, 4 H100 with 80 GB, FSDP and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}"
bash "$(dirname "$0")/../7b/qwen2-7b_grpo-lora_1_h100_fsdp_vllm.sh" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.experiment_name=qwen2-32b_grpo-lora_4_h100_fsdp_vllm \
    trainer.n_gpus_per_node=4 \
    "$@"
