#!/usr/bin/env bash
# PPO with a critic: policy filtration, DeepSeek-LLM-7B-Chat on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/run_deepseek7b_llm.sh" \
    algorithm.use_pf_ppo=true \
    actor_rollout_ref.rollout.n=5 \
    trainer.experiment_name=deepseek7b_llm_pfppo \
    "$@"
