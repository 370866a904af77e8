#!/usr/bin/env bash
# GPG (group policy gradient): Qwen2-7B-Instruct on GSM8K and MATH, one node of 8 GPUs, no reference policy.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euo pipefail

bash "$(dirname "$0")/../grpo_trainer/run_qwen2-7b_math.sh" \
    algorithm.adv_estimator=gpg \
    actor_rollout_ref.actor.policy_loss.loss_mode=gpg \
    actor_rollout_ref.actor.use_kl_loss=false \
    trainer.project_name=verl_gpg \
    "$@"
