#!/usr/bin/env bash
# DAPO in full with truncated importance sampling: a weight for each token, of at most 2, and no veto; Qwen2.5-32B, 16 nodes of 8 GPUs with 80 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

export LEVEL=token MODE=truncate THRESHOLD="${THRESHOLD:-2.0}" VETO=null

bash "$(dirname "$0")/run_dapo_qwen2.5_32b_rollout_is.sh" \
    trainer.experiment_name=DAPO-Qwen2.5-32B-TIS \
    "$@"
