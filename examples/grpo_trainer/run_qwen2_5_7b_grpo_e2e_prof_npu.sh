#!/usr/bin/env bash
# run_qwen2_5_7b_grpo_npu.sh under the Ascend profiler: one trace of each whole step in steps 2 and 4, ranks 1 and 2.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

bash "$(dirname "$0")/run_qwen2_5_7b_grpo_discrete_prof_npu.sh" \
    actor_rollout_ref.actor.profiler.tool_config.npu.discrete=false \
    actor_rollout_ref.ref.profiler.tool_config.npu.discrete=false \
    "$@"
