#!/usr/bin/env bash
# GRPO with Megatron-Core: Qwen2-7B-Instruct on GSM8K and MATH, dynamic micro-batches, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/run_qwen2-7b_math_megatron.sh" \
    data.max_prompt_length=512 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    trainer.experiment_name=qwen2-7b_seq_balance_megatron \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null \
    "$@"
