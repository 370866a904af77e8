#!/usr/bin/env bash
# PPO with a critic: Qwen2.5-0.5B-Instruct on GSM8K, one GPU with 40 GB or more.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=true \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=true \
    trainer.logger='[console,tensorboard]' \
    trainer.project_name=verl_ppo_gsm8k \
    trainer.experiment_name=qwen2.5_0.5b \
    trainer.n_gpus_per_node=1 \
    "$@"
