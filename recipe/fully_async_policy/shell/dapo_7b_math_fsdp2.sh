#!/usr/bin/env bash
# Fully asynchronous, with the reward, limits and loss of DAPO on FSDP2: Qwen2.5-Math-7B on DAPO-Math-17k; by default 4 GPUs of one node generate and 4 train.
# Data first: bash recipe/dapo/prepare_dapo_data.sh
set -euxo pipefail

HERE="$(dirname "$0")"
ENGINE="${ENGINE:-vllm}"
NNODES="${NNODES:-1}"
GENERATE="${GENERATE:-4}" # GPUs of each node
TRAIN="${TRAIN:-4}"
SEQUENCE_PARALLEL="${SEQUENCE_PARALLEL:-1}"
RESPONSES="${RESPONSES:-16}" # to each prompt
NAME="${NAME:-4_4}"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}"
CKPTS_DIR="${CKPTS_DIR:-$RAY_DATA_HOME/ckpts/DAPO/DAPO-Qwen2.5-7b-MATH-fsdp2-fully-async-$NAME}"

max_prompt_length=2048
max_response_length=8192
source "$HERE/../../../examples/settings.sh"

python3 -m recipe.fully_async_policy.fully_async_main "${DAPO[@]}" "${OFFLOAD[@]}" "${DAPO_MATH[@]}" \
    data.max_response_length=$max_response_length \
    data.train_batch_size=0 \
    data.gen_batch_size=1 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.ref.strategy=fsdp2 \
    critic.strategy=fsdp2 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SEQUENCE_PARALLEL" \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=2 \
    actor_rollout_ref.rollout.name="$ENGINE" \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_batched_tokens="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$(((max_prompt_length + max_response_length) * 2))" \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=false \
    +reward_model.reward_kwargs.max_resp_len=$max_response_length \
    rollout.nnodes="$NNODES" \
    rollout.n_gpus_per_node="$GENERATE" \
    actor_rollout_ref.rollout.n="$RESPONSES" \
    rollout.total_rollout_steps="$((512 * 400))" \
    rollout.total_epochs=10 \
    rollout.test_freq=20 \
    async_training.staleness_threshold=0.1 \
    async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=4 \
    async_training.partial_rollout=true \
    trainer.project_name=DAPO \
    trainer.experiment_name="DAPO-Qwen2.5-7b-MATH-fsdp2-fully-async-$NAME" \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.n_gpus_per_node="$TRAIN" \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=-1 \
    "$@"
