#!/usr/bin/env bash
# RLOO with the adaptive exploration reward: Qwen2.5-VL-3B-Instruct on screens and instructions, two nodes of 8 GPUs with 80 GB.
# Data first: the parquet files of InfiX-ai/omniact_grounding_filtered, in ~/data/omniact_grounding_filtered
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}"
bash "$(dirname "$0")/run_7b.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    trainer.experiment_name=3b \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=false \
    "$@"
