#!/usr/bin/env bash
# run_qwen2-7b_rm_seq_balance.sh under Nsight Systems: steps 1, 2 and 5 on ranks 0 and 4, one database for each task.
# Needs nsys and the package nvtx on every node; see docs/perf/profiling.md. Open the .nsys-rep files with nsys-ui.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

PROFILE_STEPS="${PROFILE_STEPS:-[1,2,5]}"
PROFILE_RANKS="${PROFILE_RANKS:-[0,4]}"
PROFILE_ALL_RANKS="${PROFILE_ALL_RANKS:-false}"
DISCRETE="${DISCRETE:-true}"

profile() { echo "$1.enable=true" "$1.ranks=$PROFILE_RANKS" "$1.all_ranks=$PROFILE_ALL_RANKS"; }

bash "$(dirname "$0")/run_qwen2-7b_rm_seq_balance.sh" \
    global_profiler.tool=nsys \
    global_profiler.steps="$PROFILE_STEPS" \
    global_profiler.global_tool_config.nsys.discrete="$DISCRETE" \
    global_profiler.global_tool_config.nsys.worker_nsight_options.capture-range-end=repeat \
    $(profile actor_rollout_ref.actor.profiler) \
    $(profile critic.profiler) \
    $(profile reward_model.profiler) \
    trainer.experiment_name=qwen2-7b_rm_seq_balance_nsys \
    "$@"
