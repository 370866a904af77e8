#!/usr/bin/env bash
# Supervised fine-tuning with LoRA, each sequence shared by two devices (Ulysses): Qwen3-8B on GSM8K, Ascend devices.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments: the number of devices (8 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=8
SAVE_PATH=checkpoints/gsm8k-sft-qwen3-8b
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"
source "$(dirname "$0")/../../sft_settings.sh"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer "${GSM8K_SFT[@]}" \
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
