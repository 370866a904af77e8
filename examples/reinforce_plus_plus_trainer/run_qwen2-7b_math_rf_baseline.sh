#!/usr/bin/env bash
# REINFORCE++ with a baseline per prompt: Qwen2-7B-Instruct on GSM8K and MATH, one node of 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/run_qwen2-7b_math_rf.sh" \
    algorithm.adv_estimator=reinforce_plus_plus_baseline \
    trainer.experiment_name=qwen2-7b_math_rf_baseline \
    "$@"
