#!/usr/bin/env bash
# The whole evaluation on CPU without a network: made-up problems, a tiny Qwen2 with random weights (or MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/r1_tiny_cpu}"

python3 -m "recipe.$(basename "$HERE").data_process" \
    --source synthetic \
    --local_dir "$OUT_DIR"

if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH="$OUT_DIR/model"
    python3 examples/tiny_model.py --save-dir "$MODEL_PATH"
fi

python3 -m verl.trainer.main_generation \
    trainer.device=cpu \
    trainer.n_gpus_per_node=1 \
    data.path="$OUT_DIR/test.parquet" \
    data.n_samples=2 \
    data.output_path="$OUT_DIR/responses.parquet" \
    model.path="$MODEL_PATH" \
    rollout.temperature=0.6 \
    rollout.top_p=0.95 \
    rollout.top_k=-1 \
    rollout.prompt_length=512 \
    rollout.response_length=64 \
    rollout.dtype=float32 \
    "$@"

python3 -m "recipe.$(basename "$HERE").main_eval" \
    data.path="$OUT_DIR/responses.parquet"
