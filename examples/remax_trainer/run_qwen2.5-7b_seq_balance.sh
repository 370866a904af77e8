#!/usr/bin/env bash
# ReMax: Qwen2.5-7B-Instruct on GSM8K, one node of 8 GPUs.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GSM8K[@]}" \
    algorithm.adv_estimator=remax \
    algorithm.use_kl_in_reward=true \
    data.train_batch_size=512 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    trainer.project_name=verl_remax \
    trainer.experiment_name=qwen2.5-7b_seq_balance \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=10 \
    "$@"
