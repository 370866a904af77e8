#!/usr/bin/env bash
# GRPO on the scores of a reward model: Mistral-Nemo-Instruct-2407 and Skywork-Reward-Llama-3.1-8B-v0.2 on the prompts
# of full-hh-rlhf, one node of 8 GPUs with 80 GB. Both models share the GPUs.
# Data first: python3 examples/data_preprocess/full_hh_rlhf.py --split rl --local_save_dir ~/data/full_hh_rlhf/rl
# Its rows have no ground truth to validate on; the mean of the scores shows the progress.
set -euxo pipefail

MODEL_PATH="${MODEL_PATH:-mistralai/Mistral-Nemo-Instruct-2407}"
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-Skywork/Skywork-Reward-Llama-3.1-8B-v0.2}"
source "$(dirname "$0")/../settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    data.train_files="$DATA_DIR/full_hh_rlhf/rl/train.parquet" \
    data.val_files=null \
    data.train_batch_size=1024 \
    data.max_response_length=2048 \
    data.return_raw_chat=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    reward_model.enable=true \
    reward_model.model.path="$REWARD_MODEL_PATH" \
    reward_model.model.use_remove_padding=true \
    reward_model.model.fsdp_config.param_offload=true \
    reward_model.micro_batch_size_per_gpu=8 \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=mistral13b_skyworkrm_hhrlhf \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=-1 \
    trainer.total_epochs=5 \
    trainer.val_before_train=false \
    "$@"
