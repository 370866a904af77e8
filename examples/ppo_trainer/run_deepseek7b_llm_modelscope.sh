#!/usr/bin/env bash
# PPO with a critic: DeepSeek-LLM-7B-Chat of ModelScope on GSM8K, one node of 8 GPUs. Needs the package modelscope.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

export VERL_USE_MODELSCOPE=true
bash "$(dirname "$0")/run_deepseek7b_llm.sh" \
    trainer.experiment_name=deepseek7b_llm_modelscope \
    "$@"
