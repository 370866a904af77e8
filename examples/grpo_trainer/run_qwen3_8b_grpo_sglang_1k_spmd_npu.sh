#!/usr/bin/env bash
# GRPO with SGLang: Qwen3-8B on GSM8K, responses of up to 1,024 tokens, each sequence shared by four devices (Ulysses),
# one node of 16 Ascend devices with 64 GB.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${OFFLOAD[@]}" "${GSM8K[@]}" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=qwen3_8b_sglang_1k_npu \
    trainer.device=npu \
    trainer.n_gpus_per_node=16 \
    "$@"
