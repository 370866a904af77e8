#!/usr/bin/env bash
# Generate one response to each test question of GSM8K: DeepSeek-LLM-7B-Chat, two nodes of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
export MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
export SAVE_PATH="${SAVE_PATH:-$DATA_DIR/gsm8k/deepseek7b_responses.parquet}"
bash "$(dirname "$0")/run_deepseek_v2_lite_math.sh" \
    rollout.tensor_model_parallel_size=8 \
    trainer.nnodes=2 \
    "$@"
