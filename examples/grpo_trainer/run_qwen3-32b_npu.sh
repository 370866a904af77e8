#!/usr/bin/env bash
# GRPO: Qwen3-32B on GSM8K, each sequence shared by four devices (Ulysses), two nodes of 16 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-32B}"
bash "$(dirname "$0")/run_qwen2_5_32b_grpo_npu.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 \
    trainer.experiment_name=qwen3-32b_npu \
    "$@"
