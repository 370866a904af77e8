#!/usr/bin/env bash
# Generate one response to each test question of GSM8K: DeepSeek-V2-Lite-Chat, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-deepseek-ai/DeepSeek-V2-Lite-Chat}"
SAVE_PATH="${SAVE_PATH:-$DATA_DIR/gsm8k/deepseek_v2_lite_responses.parquet}"

python3 -m verl.trainer.main_generation \
    data.path="$DATA_DIR/gsm8k/test.parquet" \
    data.n_samples=1 \
    data.batch_size=512 \
    data.output_path="$SAVE_PATH" \
    model.path="$MODEL_PATH" \
    rollout.name=vllm \
    rollout.temperature=1.0 \
    rollout.prompt_length=2048 \
    rollout.response_length=1024 \
    rollout.tensor_model_parallel_size=2 \
    rollout.gpu_memory_utilization=0.8 \
    trainer.n_gpus_per_node=8 \
    "$@"
