#!/usr/bin/env bash
# Supervised fine-tuning with LoRA: Qwen2.5-0.5B-Instruct on GSM8K.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments: the number of GPUs (2 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=2
SAVE_PATH=checkpoints/gsm8k-sft-qwen-2.5-0.5b-instruct-peft
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}"
source "$(dirname "$0")/../../sft_settings.sh"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer "${GSM8K_SFT[@]}" \
    model.partial_pretrain="$MODEL_PATH" \
    model.lora_rank=32 \
    optim.lr=1e-4 \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console,wandb]' \
    trainer.experiment_name=gsm8k-sft-qwen-2.5-0.5b-instruct-peft \
    trainer.total_epochs=2 \
    "$@"
