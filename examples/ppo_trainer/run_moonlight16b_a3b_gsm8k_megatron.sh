#!/usr/bin/env bash
# PPO with Megatron-Core: Moonlight-16B-A3B-Instruct on GSM8K, actor and critic PP 3 x EP 8, 3 nodes of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-moonshotai/Moonlight-16B-A3B-Instruct}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${RUN[@]}" "${GSM8K[@]}" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=960 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.trust_remote_code=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.trust_remote_code=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=192 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=true \
    actor_rollout_ref.actor.megatron.optimizer_offload=true \
    actor_rollout_ref.actor.megatron.grad_offload=true \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    critic.model.path="$MODEL_PATH" \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    critic.megatron.pipeline_model_parallel_size=3 \
    critic.megatron.expert_model_parallel_size=8 \
    critic.megatron.param_offload=true \
    critic.megatron.optimizer_offload=true \
    critic.megatron.grad_offload=true \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=moonlight16b_a3b_gsm8k_megatron \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=3 \
    actor_rollout_ref.model.use_remove_padding=false \
    "$@"
