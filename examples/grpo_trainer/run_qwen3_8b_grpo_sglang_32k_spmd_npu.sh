#!/usr/bin/env bash
# GRPO with SGLang: Qwen3-8B on GSM8K, responses of up to 32,768 tokens, each sequence shared by four devices (Ulysses),
# one node of 16 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/run_qwen3_8b_grpo_sglang_1k_spmd_npu.sh" \
    data.max_response_length=32768 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=33792 \
    actor_rollout_ref.rollout.max_num_batched_tokens=33792 \
    trainer.experiment_name=qwen3_8b_sglang_32k_npu \
    "$@"
