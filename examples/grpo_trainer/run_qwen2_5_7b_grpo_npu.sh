#!/usr/bin/env bash
# GRPO: Qwen2.5-7B-Instruct on GSM8K, one node of 8 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
bash "$(dirname "$0")/run_qwen3-8b_npu.sh" \
    trainer.experiment_name=qwen2_5-7b_npu \
    "$@"
