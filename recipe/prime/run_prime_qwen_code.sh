#!/usr/bin/env bash
# PRIME: Eurus-2-7B-SFT on mathematics and programming (Eurus-2-RL-Data), one node of 8 GPUs.
# Data first: download PRIME-RL/Eurus-2-RL-Data from the hub into DATA_DIR as train.parquet and validation.parquet
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/code}"

bash "$(dirname "$0")/run_prime_qwen.sh" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/validation.parquet" \
    trainer.experiment_name=Eurus-2-7B-SFT-code \
    "$@"
