#!/usr/bin/env bash
# Dr. GRPO: Qwen2.5-0.5B-Instruct on GSM8K, one GPU with 24 GB or more.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen2.5-0.5b_gsm8k.sh" \
    algorithm.norm_adv_by_std_in_grpo=false \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    trainer.project_name=verl_dr_grpo_gsm8k \
    "$@"
