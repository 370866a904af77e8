#!/usr/bin/env bash
# GRPO: DeepSeek-LLM-7B-Chat on GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${GSM8K_MATH[@]}" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160 \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=deepseek7b_llm_math \
    trainer.n_gpus_per_node=8 \
    "$@"
