#!/usr/bin/env bash
# Supervised fine-tuning on the conversations of CollabLLM: Qwen2.5-7B-Instruct on mathematical problems, one node of 8 GPUs; not run so far.
# Data first: python3 -m recipe.collabllm.process_dataset, into ~/data/collabllm-math-hard/sft
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/collabllm-math-hard/sft}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
SAVE_PATH="${SAVE_PATH:-checkpoints/collabllm-sft-math-hard}"
WORKERS="${WORKERS:-8}"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/validation.parquet" \
    data.multiturn.enable=true \
    data.train_batch_size=64 \
    data.max_length=8196 \
    model.partial_pretrain="$MODEL_PATH" \
    use_remove_padding=true \
    optim.lr=1e-6 \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console,wandb]' \
    trainer.project_name=collabllm-sft \
    trainer.experiment_name=qwen2.5-7b-math-hard \
    trainer.total_epochs=3 \
    trainer.save_freq=-1 \
    "$@"
