#!/usr/bin/env bash
# Supervised fine-tuning on solutions with a code interpreter (ReTool-SFT): Qwen2.5-7B-Instruct, one node of 8 GPUs with 80 GB, each sequence shared by four.
# Data first: python3 -m recipe.retool.retool_sft_preprocess --local_save_dir ~/data/retool_sft
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
SAVE_PATH="${SAVE_PATH:-checkpoints/retool/qwen2.5-7b-sft}"

torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA_DIR/retool_sft/train.parquet" \
    data.val_files="$DATA_DIR/retool_sft/train.parquet" \
    data.multiturn.enable=true \
    data.max_length=16384 \
    data.truncation=right \
    data.train_batch_size=32 \
    model.partial_pretrain="$MODEL_PATH" \
    model.strategy=fsdp \
    ulysses_sequence_parallel_size=4 \
    use_remove_padding=true \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
    trainer.logger='[console,wandb]' \
    trainer.project_name=retool \
    trainer.experiment_name=qwen2.5-7b-sft \
    trainer.save_freq=after_each_epoch \
    trainer.test_freq=-1 \
    trainer.total_epochs=6 \
    "$@"
