#!/usr/bin/env bash
# Supervised fine-tuning on CPU: the warm-up of scripts/quickstart.sh, which prepares its model and data (or give others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-outputs/quickstart/base}"
OUT_DIR="${OUT_DIR:-outputs/sft_tiny_cpu}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    "data.train_files='$DATA_DIR/sft_train.parquet'" \
    "data.val_files='$DATA_DIR/sft_test.parquet'" \
    data.train_batch_size=64 \
    data.max_length=96 \
    "model.path='$MODEL_PATH'" \
    optim.lr=3e-3 \
    trainer.project_name=quickstart \
    "trainer.default_local_dir='$OUT_DIR'" \
    trainer.total_epochs=2 \
    trainer.total_training_steps=200 \
    trainer.test_freq=100 \
    "$@"
