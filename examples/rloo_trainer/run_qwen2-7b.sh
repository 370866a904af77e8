#!/usr/bin/env bash
# RLOO: Qwen2-7B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2-7B-Instruct}"
bash "$(dirname "$0")/../grpo_trainer/run_deepseek7b_llm.sh" \
    algorithm.adv_estimator=rloo \
    algorithm.use_kl_in_reward=true \
    actor_rollout_ref.actor.use_kl_loss=false \
    trainer.project_name=verl_rloo \
    trainer.experiment_name=qwen2-7b \
    "$@"
