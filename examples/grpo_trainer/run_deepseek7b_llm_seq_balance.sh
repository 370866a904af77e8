#!/usr/bin/env bash
# GRPO: DeepSeek-LLM-7B-Chat on GSM8K with dynamic micro-batches, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
bash "$(dirname "$0")/run_qwen2-7b_seq_balance.sh" \
    data.max_response_length=512 \
    trainer.experiment_name=deepseek7b_llm_seq_balance \
    actor_rollout_ref.rollout.mode=sync \
    "$@"
