#!/usr/bin/env bash
# GRPO with images: Qwen2.5-VL-3B-Instruct on Geometry3K, one node of 8 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_vl-3b.sh" \
    trainer.experiment_name=qwen2_5_vl-3b_npu \
    trainer.device=npu \
    "$@"
