#!/usr/bin/env bash
# run_qwen2.5-0.5b_gsm8k.sh with the history of the allocator: snapshots of steps 1 and 2, for https://pytorch.org/memory_viz
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

PROFILE_DIR="${PROFILE_DIR:-outputs/memory}"

bash "$(dirname "$0")/run_qwen2.5-0.5b_gsm8k.sh" \
    global_profiler.tool=torch_memory \
    global_profiler.steps='[1,2]' \
    global_profiler.save_path="$PROFILE_DIR" \
    global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries=100000 \
    global_profiler.global_tool_config.torch_memory.stack_depth=32 \
    trainer.total_training_steps=2 \
    "$@"
