#!/usr/bin/env bash
# GRPO: Qwen2.5-14B-Instruct on GSM8K, four H800 with 80 GB, FSDP with offload and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}"
bash "$(dirname "$0")/../7b/qwen2-7b_grpo_2_h800_fsdp_vllm.sh" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.experiment_name=qwen2_14b_grpo_4_h800_fsdp_vllm \
    trainer.n_gpus_per_node=4 \
    "$@"
