#!/usr/bin/env bash
# GRPO with images: MiniCPM-o 2.6 on Geometry3K with the data set of recipe/minicpmo, eight GPUs with 80 GB.
# Data first: python3 examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-openbmb/MiniCPM-o-2_6}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${OFFLOAD[@]}" "${GEO3K[@]}" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=false \
    data.trust_remote_code=true \
    data.custom_cls.path=recipe/minicpmo/rl_dataset.py \
    data.custom_cls.name=RLHFDataset \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.trust_remote_code=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=false \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    trainer.project_name=verl_grpo_geo3k \
    trainer.experiment_name=minicpmo2_6 \
    trainer.n_gpus_per_node=8 \
    "$@"
