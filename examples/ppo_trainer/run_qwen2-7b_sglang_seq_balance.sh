#!/usr/bin/env bash
# PPO with a critic and SGLang: Qwen2-7B-Instruct on GSM8K and MATH with dynamic micro-batches, 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/run_qwen2-7b_seq_balance.sh" \
    actor_rollout_ref.rollout.name=sglang \
    trainer.experiment_name=qwen2-7b_sglang_seq_balance \
    "$@"
