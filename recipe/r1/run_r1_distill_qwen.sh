#!/usr/bin/env bash
# Evaluate DeepSeek-R1-Distill-Qwen-1.5B on AIME 2024, GPQA diamond, CNMO 2024 and LiveCodeBench, one node of 8 GPUs.
set -euxo pipefail

HERE="$(dirname "$0")"
MODEL_PATH="${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}"
DATA_DIR="${DATA_DIR:-$HOME/data/r1}"
N_SAMPLES="${N_SAMPLES:-8}"
OUTPUT="${OUTPUT:-$DATA_DIR/test-output-$N_SAMPLES.parquet}"

python3 -m "recipe.$(basename "$HERE").data_process" \
    --tasks all \
    --local_dir "$DATA_DIR"

python3 -m verl.trainer.main_generation \
    trainer.n_gpus_per_node=8 \
    data.path="$DATA_DIR/test.parquet" \
    data.batch_size=1024 \
    data.n_samples="$N_SAMPLES" \
    data.output_path="$OUTPUT" \
    model.path="$MODEL_PATH" \
    rollout.temperature=0.6 \
    rollout.top_p=0.95 \
    rollout.top_k=-1 \
    rollout.prompt_length=1024 \
    rollout.response_length=32768 \
    rollout.tensor_model_parallel_size=1 \
    rollout.gpu_memory_utilization=0.95 \
    rollout.max_num_batched_tokens=65536 \
    rollout.enforce_eager=false \
    "$@"

python3 -m "recipe.$(basename "$HERE").main_eval" \
    data.path="$OUTPUT"
