#!/usr/bin/env bash
# run_tiny_cpu.sh under torch.profiler: Chrome traces of actor and rollout in steps 1 and 2, for https://ui.perfetto.dev
set -euxo pipefail

PROFILE_DIR="${PROFILE_DIR:-outputs/profile}"

bash "$(dirname "$0")/run_tiny_cpu.sh" \
    global_profiler.tool=torch \
    global_profiler.steps='[1,2]' \
    global_profiler.save_path="$PROFILE_DIR" \
    actor_rollout_ref.actor.profiler.enable=true \
    trainer.total_training_steps=2 \
    trainer.save_freq=-1 \
    trainer.test_freq=-1 \
    "$@"
