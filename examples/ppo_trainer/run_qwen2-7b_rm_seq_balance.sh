#!/usr/bin/env bash
# PPO with a critic on the scores of a reward model, with dynamic micro-batches: Qwen2-7B-Instruct on the
# prompts of GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-sfairXC/FsfairX-LLaMA3-RM-v0.1}"
bash "$(dirname "$0")/run_qwen2-7b_seq_balance.sh" \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.return_raw_chat=true \
    reward_model.enable=true \
    reward_model.model.path="$REWARD_MODEL_PATH" \
    reward_model.model.use_remove_padding=true \
    reward_model.model.fsdp_config.param_offload=true \
    reward_model.use_dynamic_bsz=true \
    reward_model.forward_max_token_len_per_gpu=98304 \
    trainer.experiment_name=qwen2-7b_rm_seq_balance \
    "$@"
