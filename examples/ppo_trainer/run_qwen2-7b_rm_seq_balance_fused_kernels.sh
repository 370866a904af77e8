#!/usr/bin/env bash
# PPO with a critic on the scores of a reward model, with dynamic micro-batches and a head that makes no
# logits: Qwen2-7B-Instruct on the prompts of GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/run_qwen2-7b_rm_seq_balance.sh" \
    actor_rollout_ref.model.use_fused_kernels=true \
    trainer.experiment_name=qwen2-7b_rm_seq_balance_fused_kernels \
    "$@"
