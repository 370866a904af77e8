#!/usr/bin/env bash
# Supervised fine-tuning on solutions with a code interpreter (ReTool-SFT): Qwen2.5-7B-Instruct, one node of 8 Ascend devices with 64 GB, each sequence shared by four.
# Data first: python3 -m recipe.retool.retool_sft_preprocess --local_save_dir ~/data/retool_sft
set -euo pipefail

export SAVE_PATH="${SAVE_PATH:-checkpoints/retool/qwen2.5-7b-sft-npu}"
bash "$(dirname "$0")/run_qwen2_7b_sft.sh" \
    trainer.device=npu \
    trainer.experiment_name=qwen2.5-7b-sft-npu \
    "$@"
