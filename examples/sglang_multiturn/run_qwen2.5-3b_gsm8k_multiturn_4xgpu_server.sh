#!/usr/bin/env bash
# GRPO with a tool that scores answers and servers that have GPUs for themselves: Qwen2.5-3B-Instruct on GSM8K, 2 GPUs train and 2 generate.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2.5-3b_gsm8k_multiturn_server.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=2 \
    trainer.experiment_name=qwen2.5-3b_4xgpu_server \
    trainer.n_gpus_per_node=2 \
    "$@"
