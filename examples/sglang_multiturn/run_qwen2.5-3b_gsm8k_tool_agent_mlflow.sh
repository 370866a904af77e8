#!/usr/bin/env bash
# GRPO with a tool that scores answers, and a trace of every trajectory in MLflow (MLFLOW_TRACKING_URI): Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k_tool_agent_loop.py --local_save_dir ~/data/gsm8k_tool_agent
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
export MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-sqlite:////tmp/mlruns.db}"
bash "$(dirname "$0")/run_qwen3-4b_gsm8k_multiturn.sh" \
    data.max_response_length=1024 \
    data.train_files="$DATA_DIR/gsm8k_tool_agent/train.parquet" \
    data.val_files="$DATA_DIR/gsm8k_tool_agent/test.parquet" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.trace.backend=mlflow \
    actor_rollout_ref.rollout.trace.token2text=true \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    trainer.total_training_steps=2 \
    trainer.logger='[console,mlflow]' \
    trainer.experiment_name=qwen2.5-3b_mlflow \
    "$@"
