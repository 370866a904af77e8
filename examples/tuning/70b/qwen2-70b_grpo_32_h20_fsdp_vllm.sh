#!/usr/bin/env bash
# GRPO: Qwen2.5-72B-Instruct on GSM8K, 4 nodes of 8 H20 with 96 GB, FSDP with offload and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-72B-Instruct}"
bash "$(dirname "$0")/../7b/qwen2-7b_grpo_2_h800_fsdp_vllm.sh" \
    data.train_batch_size=512 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=16 \
    trainer.experiment_name=qwen2-70b_grpo_32_h20_fsdp_vllm \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=4 \
    "$@"
