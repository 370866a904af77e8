#!/usr/bin/env bash
# DAPO in full: Qwen2.5-7B on DAPO-Math-17k, one node of 16 Ascend devices with 64 GB.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

HERE="$(dirname "$0")"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-7B-npu}"
TRAIN_FILE="${TRAIN_FILE:-$RAY_DATA_HOME/data/dapo-math-17k.parquet}"
TEST_FILE="${TEST_FILE:-$RAY_DATA_HOME/data/aime-2024.parquet}"
NNODES="${NNODES:-1}"

max_prompt_length=2048
max_response_length=20480

python3 -m "recipe.$(basename "$HERE").main_dapo" \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=false \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files="$TRAIN_FILE" \
    data.val_files="$TEST_FILE" \
    data.prompt_key=prompt \
    data.truncation=left \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    data.train_batch_size=256 \
    data.gen_batch_size=768 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.enable_chunked_prefill=true \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    reward_model.reward_manager=dapo \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=4096 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger='[console,wandb]' \
    trainer.project_name=DAPO \
    trainer.experiment_name=DAPO-Qwen2.5-7B-npu \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.device=npu \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes="$NNODES" \
    trainer.val_before_train=true \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.total_epochs=1 \
    "$@"
