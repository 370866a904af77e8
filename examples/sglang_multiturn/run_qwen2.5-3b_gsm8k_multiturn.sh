#!/usr/bin/env bash
# GRPO with a tool that scores answers: Qwen2.5-3B-Instruct on GSM8K, one node of 8 GPUs; steps 1 and 2 leave snapshots of GPU memory.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
bash "$(dirname "$0")/run_qwen3-4b_gsm8k_multiturn.sh" \
    data.max_response_length=1024 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    global_profiler.tool=torch_memory \
    global_profiler.steps='[1,2]' \
    global_profiler.save_path=outputs/gsm8k_multiturn_memory \
    actor_rollout_ref.actor.profiler.enable=true \
    actor_rollout_ref.actor.profiler.all_ranks=true \
    trainer.experiment_name=qwen2.5-3b \
    "$@"
