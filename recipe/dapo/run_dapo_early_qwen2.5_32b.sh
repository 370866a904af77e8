#!/usr/bin/env bash
# Early DAPO, without dynamic sampling and token-level loss: Qwen2.5-32B on DAPO-Math-17k, 16 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/Early-DAPO-Qwen2.5-32B}"
bash "$(dirname "$0")/run_dapo_wo_ds_qwen2.5_32b.sh" \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    trainer.experiment_name=Early-DAPO-Qwen2.5-32B \
    "$@"
