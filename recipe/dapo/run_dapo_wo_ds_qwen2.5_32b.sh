#!/usr/bin/env bash
# DAPO without dynamic sampling: Qwen2.5-32B on DAPO-Math-17k, 16 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
export CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-wo-DS-Qwen2.5-32B}"
bash "$(dirname "$0")/run_dapo_qwen2.5_32b.sh" \
    algorithm.filter_groups.enable=false \
    algorithm.filter_groups.metric=null \
    algorithm.filter_groups.max_num_gen_batches=0 \
    data.gen_batch_size='${data.train_batch_size}' \
    trainer.experiment_name=DAPO-wo-DS-Qwen2.5-32B \
    "$@"
