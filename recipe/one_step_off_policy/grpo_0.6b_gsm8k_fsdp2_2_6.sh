#!/usr/bin/env bash
# One step off policy: GRPO with Qwen3-0.6B on GSM8K with FSDP2 and vLLM, one node of 8 GPUs, 2 generate and 6 train.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-0.6B}"
bash "$(dirname "$0")/grpo_3b_gsm8k_fsdp2_2_6.sh" \
    trainer.experiment_name=qwen3-0.6b-fsdp2-vllm-one-step-off-2-6 \
    "$@"
