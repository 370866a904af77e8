#!/usr/bin/env bash
# Supervised fine-tuning: Qwen2.5-0.5B on chats in a `messages` column, one GPU with 16 GB or more.
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k_sft}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B}"
WORKERS="${WORKERS:-1}"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.sft_trainer \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=256 \
    data.max_token_len_per_gpu=16384 \
    data.truncation=right \
    model.path="$MODEL_PATH" \
    model.use_remove_padding=true \
    optim.lr=1e-5 \
    trainer.logger='[console,tensorboard]' \
    trainer.project_name=verl_sft_gsm8k \
    trainer.experiment_name=qwen2.5_0.5b \
    trainer.total_epochs=3 \
    trainer.save_freq=after_each_epoch \
    trainer.test_freq=after_each_epoch \
    "$@"
