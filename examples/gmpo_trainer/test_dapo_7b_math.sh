#!/usr/bin/env bash
# GMPO on the data and with the reward of DAPO: Qwen2.5-Math-7B on DAPO-Math-17k, 8 nodes of 8 GPUs.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/GMPO/GMPO-Qwen2.5-7b-MATH}"
bash "$(dirname "$0")/../../recipe/dapo/test_dapo_7b_math.sh" \
    actor_rollout_ref.actor.clip_ratio_low=0.4 \
    actor_rollout_ref.actor.clip_ratio_high=0.4 \
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
    trainer.project_name=GMPO \
    trainer.experiment_name=GMPO-Qwen2.5-7b-MATH \
    "$@"
