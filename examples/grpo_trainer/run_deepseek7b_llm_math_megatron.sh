#!/usr/bin/env bash
# GRPO with Megatron-Core: DeepSeek-LLM-7B-Chat on GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
bash "$(dirname "$0")/run_qwen2-7b_math_megatron.sh" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160 \
    trainer.experiment_name=deepseek7b_llm_math_megatron \
    "$@"
