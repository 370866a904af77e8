#!/usr/bin/env bash
# GRPO with images and SGLang: Qwen2.5-VL-7B-Instruct on Geometry3K, eight GPUs with 80 GB; steps 1 and 2 leave
# snapshots of GPU memory.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" sglang \
    actor_rollout_ref.rollout.mode=sync \
    global_profiler.tool=torch_memory \
    global_profiler.steps='[1,2]' \
    global_profiler.save_path="${PROFILE_DIR:-outputs/memory}" \
    trainer.experiment_name=qwen2_5_vl-7b_sglang \
    "$@"
