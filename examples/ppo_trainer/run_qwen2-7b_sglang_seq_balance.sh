#!/usr/bin/env bash
# PPO with a critic and SGLang: Qwen2-7B-Instruct on GSM8K and MATH with micro-batches of a number of tokens, 8 GPUs.
# Data first: gsm8k.py and math_dataset.py of examples/data_preprocess, into ~/data/gsm8k and ~/data/math
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2-7B-Instruct}"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=false \
    data.train_files="['$DATA_DIR/gsm8k/train.parquet','$DATA_DIR/math/train.parquet']" \
    data.val_files="['$DATA_DIR/gsm8k/test.parquet','$DATA_DIR/math/test.parquet']" \
    data.train_batch_size=512 \
    data.max_prompt_length=4096 \
    data.max_response_length=4096 \
    data.filter_overlong_prompts=true \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.model.enable_gradient_checkpointing=true \
    critic.optim.lr=1e-5 \
    critic.ppo_max_token_len_per_gpu=98304 \
    trainer.critic_warmup=0 \
    trainer.logger='[console,wandb]' \
    trainer.project_name=verl_ppo \
    trainer.experiment_name=qwen2-7b_sglang_seq_balance \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
