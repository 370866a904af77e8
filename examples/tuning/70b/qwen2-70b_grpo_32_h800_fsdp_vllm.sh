#!/usr/bin/env bash
# GRPO: Qwen2.5-72B-Instruct on GSM8K, 4 nodes of 8 H800 with 80 GB, FSDP with offload and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/qwen2-70b_grpo_32_h20_fsdp_vllm.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    trainer.experiment_name=qwen2-70b_grpo_32_h800_fsdp_vllm \
    "$@"
