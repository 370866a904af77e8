#!/usr/bin/env bash
# Supervised fine-tuning with FSDP2, each sequence shared by two GPUs (Ulysses): Seed-OSS-36B-Base on GSM8K,
# one node of 8 GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments: the number of GPUs (8 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=8
SAVE_PATH=checkpoints/gsm8k-sft-seed-oss-36b
MODEL_PATH="${MODEL_PATH:-ByteDance-Seed/Seed-OSS-36B-Base}"
source "$(dirname "$0")/../../sft_settings.sh"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer "${GSM8K_SFT[@]}" \
    model.partial_pretrain="$MODEL_PATH" \
    model.strategy=fsdp2 \
    model.fsdp_config.model_dtype=bf16 \
    ulysses_sequence_parallel_size=2 \
    use_remove_padding=true \
    optim.lr=1e-5 \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console,wandb]' \
    trainer.experiment_name=gsm8k-sft-seed-oss-36b \
    trainer.total_epochs=1 \
    "$@"
