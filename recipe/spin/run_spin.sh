#!/usr/bin/env bash
# SPIN: Qwen2.5-3B-Instruct on GSM8K by pairs of its own responses, one node of 4 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

HERE="$(dirname "$0")"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_spin" "${GSM8K[@]}" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
    trainer.logger='[console]' \
    trainer.n_gpus_per_node=4 \
    trainer.save_freq=-1 \
    trainer.test_freq=1 \
    trainer.total_epochs=1000 \
    "$@"
