#!/usr/bin/env bash
# run_qwen2_5_7b_grpo_npu.sh under the Ascend profiler: one trace of each whole step in steps 2 and 4, ranks 1 and 2.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

PROFILE_DIR="${PROFILE_DIR:-outputs/profile_data}"

bash "$(dirname "$0")/run_qwen2_5_7b_grpo_npu.sh" \
    global_profiler.tool=npu \
    global_profiler.steps='[2,4]' \
    global_profiler.save_path="$PROFILE_DIR" \
    actor_rollout_ref.actor.profiler.enable=true \
    actor_rollout_ref.actor.profiler.ranks='[1,2]' \
    actor_rollout_ref.actor.profiler.tool_config.npu.contents='[npu,cpu]' \
    actor_rollout_ref.actor.profiler.tool_config.npu.level=level0 \
    actor_rollout_ref.actor.profiler.tool_config.npu.discrete=false \
    actor_rollout_ref.actor.profiler.tool_config.npu.analysis=true \
    actor_rollout_ref.ref.profiler.enable=true \
    actor_rollout_ref.ref.profiler.ranks='[1,2]' \
    actor_rollout_ref.ref.profiler.tool_config.npu.contents='[npu,cpu]' \
    actor_rollout_ref.ref.profiler.tool_config.npu.level=level0 \
    actor_rollout_ref.ref.profiler.tool_config.npu.discrete=false \
    actor_rollout_ref.ref.profiler.tool_config.npu.analysis=true \
    trainer.total_training_steps=5 \
    trainer.save_freq=-1 \
    trainer.test_freq=-1 \
    "$@"
