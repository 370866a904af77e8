#!/usr/bin/env bash
# PPO with a critic: each sequence shared by two devices (Ulysses), Qwen3-8B on GSM8K, one node of 8 Ascend devices.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${OFFLOAD[@]}" "${GSM8K[@]}" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=8 \
    critic.ulysses_sequence_parallel_size=2 \
    critic.model.fsdp_config.param_offload=true \
    critic.model.fsdp_config.optimizer_offload=true \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=qwen3-8b_npu \
    trainer.device=npu \
    trainer.n_gpus_per_node=8 \
    "$@"
