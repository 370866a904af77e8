#!/usr/bin/env bash
# PPO with a critic: each sequence shared by two GPUs (Ulysses), DeepSeek-LLM-7B-Chat on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/run_deepseek7b_llm.sh" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    critic.ulysses_sequence_parallel_size=2 \
    trainer.experiment_name=deepseek7b_llm_sp2 \
    "$@"
