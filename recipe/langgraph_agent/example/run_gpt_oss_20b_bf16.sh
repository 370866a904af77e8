#!/usr/bin/env bash
# GRPO of gpt-oss-20b in bf16 on expressions that need the tool, two nodes of 8 GPUs; not run so far.
set -euo pipefail

export ENGINE="${ENGINE:-sglang}"
export MODEL_PATH="${MODEL_PATH:-lmsys/gpt-oss-20b-bf16}"
export NNODES="${NNODES:-2}"
bash "$(dirname "$0")/run_qwen2.5_3b.sh" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.multi_turn.format=gpt-oss \
    trainer.experiment_name=gpt_oss_20b \
    "$@"
