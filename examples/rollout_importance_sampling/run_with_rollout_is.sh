#!/usr/bin/env bash
# PPO whose loss corrects for the gap between rollout engine and trainer: Qwen2.5-7B-Instruct on GSM8K, 8 GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"

# Importance weights. Watch first: ROLLOUT_IS=false reports the metrics and leaves the loss alone.
ROLLOUT_IS="${ROLLOUT_IS:-true}"
LEVEL="${LEVEL:-token}"           # token, sequence or geometric
MODE="${MODE:-truncate}"          # truncate, or mask (also spelled clip)
THRESHOLD="${THRESHOLD:-2.0}"     # upper limit of a weight; null turns everything off
THRESHOLD_LOWER="${THRESHOLD_LOWER:-null}" # null is 1 / THRESHOLD
VETO="${VETO:-1e-4}"              # a token below this ratio drops its sequence; null is off
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" \
    algorithm.adv_estimator=gae \
    algorithm.lam=0.95 \
    algorithm.rollout_is="$ROLLOUT_IS" \
    algorithm.rollout_is_threshold="$THRESHOLD" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=true \
    trainer.logger='[console,tensorboard]' \
    trainer.project_name=verl_rollout_is \
    trainer.experiment_name="qwen2.5_7b_${LEVEL}_${MODE}" \
    trainer.n_gpus_per_node=8 \
    "$@"
