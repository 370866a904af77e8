#!/usr/bin/env bash
# GRPO: Seed-OSS-36B-Base on GSM8K with FSDP2, one node of 8 GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-ByteDance-Seed/Seed-OSS-36B-Base}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${OFFLOAD[@]}" "${GSM8K[@]}" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=seed_oss_36b \
    trainer.n_gpus_per_node=8 \
    "$@"
