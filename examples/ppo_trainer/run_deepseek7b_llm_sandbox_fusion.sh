#!/usr/bin/env bash
# PPO with a critic: code rewards by a remote sandbox, DeepSeek-LLM-7B-Chat on Eurus-2-RL-Data, one node of 8 GPUs.
# Data first: PRIME-RL/Eurus-2-RL-Data, train.parquet and validation.parquet in $DATA_DIR/eurus2_rl
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
SANDBOX_URL="${SANDBOX_URL:-http://localhost:8080/run_code}" # of a SandboxFusion server
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA_DIR/eurus2_rl/train.parquet" \
    data.val_files="$DATA_DIR/eurus2_rl/validation.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1536 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=32 \
    reward_model.reward_manager=prime \
    reward_model.sandbox_fusion.url="$SANDBOX_URL" \
    reward_model.sandbox_fusion.max_concurrent=128 \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=deepseek7b_llm_sandbox_fusion \
    trainer.n_gpus_per_node=8 \
    "$@"
