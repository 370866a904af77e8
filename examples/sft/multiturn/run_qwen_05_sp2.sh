#!/usr/bin/env bash
# Supervised fine-tuning on chats of several turns, each sequence shared by two GPUs (Ulysses): Qwen2.5-0.5B-Instruct.
# Data first: python3 examples/data_preprocess/multiturn.py --local_dir ~/data/multiturn
# Arguments: the number of GPUs (2 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=2
SAVE_PATH=checkpoints/multiturn-sft-qwen-2.5-0.5b-instruct-sp2
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}"
source "$(dirname "$0")/../../sft_settings.sh"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA_DIR/multiturn/train.parquet" \
    data.val_files="$DATA_DIR/multiturn/test.parquet" \
    data.multiturn.enable=true \
    data.train_batch_size=4 \
    data.micro_batch_size_per_gpu=2 \
    model.partial_pretrain="$MODEL_PATH" \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console,wandb]' \
    trainer.experiment_name=multiturn-sft-qwen-2.5-0.5b-instruct-sp2 \
    trainer.total_training_steps=100 \
    "$@"
