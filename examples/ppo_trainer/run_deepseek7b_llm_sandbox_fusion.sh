#!/usr/bin/env bash
# PPO with a critic: code rewards by a remote sandbox, DeepSeek-LLM-7B-Chat on Eurus-2-RL-Data, one node of 8 GPUs.
# Data first: PRIME-RL/Eurus-2-RL-Data, train.parquet and validation.parquet in $DATA_DIR/eurus2_rl
set -euo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
SANDBOX_URL="${SANDBOX_URL:-http://localhost:8080/run_code}" # of a SandboxFusion server
bash "$(dirname "$0")/run_deepseek7b_llm.sh" \
    data.train_files="$DATA_DIR/eurus2_rl/train.parquet" \
    data.val_files="$DATA_DIR/eurus2_rl/validation.parquet" \
    data.max_prompt_length=1536 \
    data.max_response_length=2048 \
    reward_model.reward_manager=prime \
    reward_model.sandbox_fusion.url="$SANDBOX_URL" \
    reward_model.sandbox_fusion.max_concurrent=128 \
    trainer.experiment_name=deepseek7b_llm_sandbox_fusion \
    "$@"
