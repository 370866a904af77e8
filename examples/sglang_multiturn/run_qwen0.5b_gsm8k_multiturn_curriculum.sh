#!/usr/bin/env bash
# GRPO with a tool that scores answers, easy problems first (curriculum.py): Qwen2.5-0.5B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool
# Arguments: the rollout engine (sglang unless given), then overrides.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}"
bash "$HERE/run_qwen3-4b_gsm8k_multiturn.sh" \
    data.max_response_length=1024 \
    data.sampler.class_path="$HERE/curriculum.py" \
    data.sampler.class_name=EasiestFirst \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    trainer.experiment_name=qwen2.5-0.5b_curriculum \
    "$@"
