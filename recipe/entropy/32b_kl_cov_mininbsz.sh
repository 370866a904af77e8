#!/usr/bin/env bash
# KL-Cov with smaller mini-batches, so twice the updates of a step: Qwen2.5-32B on DAPO-Math-17k, 8 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export CKPTS_DIR="${CKPTS_DIR:-${RAY_DATA_HOME:-$HOME/verl}/ckpts/entropy/klcov-mininbsz-qwen2.5-32b}"

bash "$(dirname "$0")/32b_kl_cov.sh" \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    trainer.experiment_name=klcov-mininbsz-qwen2.5-32b \
    "$@"
