#!/usr/bin/env bash
# GRPO with images: Qwen2.5-VL-3B-Instruct on Geometry3K, eight GPUs with 40 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}"
bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    trainer.experiment_name=qwen2_5_vl-3b \
    "$@"
