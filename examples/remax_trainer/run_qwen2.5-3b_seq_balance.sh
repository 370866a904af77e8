#!/usr/bin/env bash
# ReMax: Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
bash "$(dirname "$0")/run_qwen2.5-7b_seq_balance.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000 \
    trainer.experiment_name=qwen2.5-3b_seq_balance \
    "$@"
