#!/usr/bin/env bash
# GRPO with images: Qwen2.5-VL-7B-Instruct on Geometry3K, dynamic micro-batches, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
# Arguments: the rollout engine (vllm unless given), then overrides.
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_vl-7b.sh" \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=6144 \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null \
    trainer.experiment_name=qwen2_5_vl-7b_seq_balance \
    "$@"
