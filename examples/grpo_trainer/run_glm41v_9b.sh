#!/usr/bin/env bash
# GRPO with images: GLM-4.1V-9B-Thinking on Geometry3K, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-zai-org/GLM-4.1V-9B-Thinking}"
bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" \
    trainer.experiment_name=glm41v_9b \
    "$@"
