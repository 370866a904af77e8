#!/usr/bin/env bash
# Supervised fine-tuning: deepseek-coder-6.7b-instruct on GSM8K.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments: the number of GPUs (8 unless given), the folder of checkpoints, then overrides.
set -euxo pipefail

WORKERS=8
SAVE_PATH=checkpoints/gsm8k-sft-deepseek-coder-6.7b-instruct
MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-coder-6.7b-instruct}"
source "$(dirname "$0")/../../sft_settings.sh"

torchrun --standalone --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer "${GSM8K_SFT[@]}" \
    model.partial_pretrain="$MODEL_PATH" \
    trainer.default_local_dir="$SAVE_PATH" \
    trainer.logger='[console,wandb]' \
    trainer.experiment_name=gsm8k-sft-deepseek-coder-6.7b-instruct \
    trainer.total_epochs=4 \
    "$@"
