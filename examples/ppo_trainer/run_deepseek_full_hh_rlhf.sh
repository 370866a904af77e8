#!/usr/bin/env bash
# PPO with Megatron-Core on the scores of a reward model: DeepSeek-LLM-7B-Chat on the prompts of full-hh-rlhf, 8 GPUs.
# REWARD_MODEL_PATH names a model with one label, trained on the comparisons of full_hh_rlhf.py --split rm.
# Data first: python3 examples/data_preprocess/full_hh_rlhf.py --split rl --local_save_dir ~/data/full_hh_rlhf/rl
# Its rows have no ground truth to validate on; the mean of the scores shows the progress.
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-deepseek-ai/deepseek-llm-7b-chat}"
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-$HOME/models/deepseek-llm-7b-rm}"

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA_DIR/full_hh_rlhf/rl/train.parquet" \
    data.val_files=null \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=true \
    data.truncation=left \
    data.return_raw_chat=true \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    critic.model.path="$MODEL_PATH" \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    reward_model.enable=true \
    reward_model.megatron.tensor_model_parallel_size=2 \
    reward_model.megatron.pipeline_model_parallel_size=2 \
    reward_model.model.path="$REWARD_MODEL_PATH" \
    reward_model.micro_batch_size_per_gpu=8 \
    reward_model.megatron.param_offload=true \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=deepseek_full_hh_rlhf \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=-1 \
    trainer.total_epochs=1 \
    trainer.val_before_train=false \
    "$@"
