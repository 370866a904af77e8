#!/usr/bin/env bash
# GRPO: Qwen2.5-14B-Instruct on GSM8K, four H800 with 80 GB, FSDP with offload and vLLM.
# Data first: python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}"
source "$(dirname "$0")/../../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${OFFLOAD[@]}" "${GSM8K[@]}" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=verl_tuning \
    trainer.experiment_name=qwen2_14b_grpo_4_h800_fsdp_vllm \
    trainer.n_gpus_per_node=4 \
    "$@"
