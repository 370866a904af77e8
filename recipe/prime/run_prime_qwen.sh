#!/usr/bin/env bash
# PRIME: Eurus-2-7B-SFT (a Qwen2.5-Math-7B) on grade-school and competition mathematics, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py, and python3 examples/data_preprocess/math_dataset.py
set -euxo pipefail

HERE="$(dirname "$0")"
MODEL_PATH="${MODEL_PATH:-PRIME-RL/Eurus-2-7B-SFT}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_prime" "${RUN[@]}" "${OFFLOAD[@]}" "${GSM8K_MATH[@]}" \
    data.train_batch_size=64 \
    data.val_batch_size=6312 \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=5e-7 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    algorithm.adv_estimator=rloo \
    reward_model.model.path="$MODEL_PATH" \
    reward_model.micro_batch_size_per_gpu=1 \
    reward_model.mini_batch_size=64 \
    reward_model.model.optim.lr=1e-6 \
    reward_model.reward_manager=prime \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=prime_example \
    trainer.experiment_name=Eurus-2-7B-SFT-gsm8k \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=64 \
    trainer.test_freq=64 \
    "$@"
