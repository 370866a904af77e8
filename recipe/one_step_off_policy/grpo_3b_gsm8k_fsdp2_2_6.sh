#!/usr/bin/env bash
# One step off policy: GRPO with Qwen2.5-3B-Instruct on GSM8K with FSDP2 and vLLM, one node of 8 GPUs, 2 generate and 6 train.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

HERE="$(dirname "$0")"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
source "$HERE/../../examples/settings.sh"

python3 -m "recipe.$(basename "$HERE").main_ppo" "${RUN[@]}" "${GRPO[@]}" "${GSM8K[@]}" \
    data.train_batch_size=1152 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    critic.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=192 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    algorithm.rollout_is=true \
    algorithm.rollout_is_threshold=2.0 \
    trainer.project_name=verl_grpo_gsm8k \
    trainer.experiment_name=qwen2.5-3b-instruct-fsdp2-vllm-one-step-off-2-6 \
    trainer.n_gpus_per_node=6 \
    trainer.save_freq=-1 \
    trainer.total_epochs=2 \
    "$@"
