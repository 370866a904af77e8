#!/usr/bin/env bash
# GRPO with images: Qwen2.5-VL-7B-Instruct on Geometry3K, its vision tower as it is, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" \
    actor_rollout_ref.actor.freeze_vision_tower=true \
    trainer.experiment_name=qwen2_5_vl-7b_freeze_vision \
    "$@"
