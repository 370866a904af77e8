#!/usr/bin/env bash
# Supervised fine-tuning with LoRA, each sequence shared by two devices (Ulysses): Qwen3-8B on GSM8K, Ascend devices.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments: the number of devices (8 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=8
if [[ $# -gt 0 && "$1" != *=* ]]; then
    WORKERS="$1"
    shift
fi
SAVE_PATH=checkpoints/gsm8k-sft-qwen3-8b
if [[ $# -gt 0 && "$1" != *=* ]]; then
    SAVE_PATH="$1"
    shift
fi
DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA_DIR/gsm8k/train.parquet" \
    data.val_files="$DATA_DIR/gsm8k/test.parquet" \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    data.prompt_dict_keys='[question]' \
    data.response_dict_keys='[answer]' \
    data.train_batch_size=256 \
    data.micro_batch_size_per_gpu=8 \
    model.partial_pretrain="$MODEL_PATH" \
    model.strategy=fsdp \
    model.lora_rank=32 \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true \
    optim.lr=1e-4 \
    trainer.device=npu \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console]' \
    trainer.experiment_name=gsm8k-sft-qwen3-8b \
    trainer.total_epochs=2 \
    "$@"
