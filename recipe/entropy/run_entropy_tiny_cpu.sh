#!/usr/bin/env bash
# KL-Cov on CPU; LOSS=clip_cov is Clip-Cov, LOSS=vanilla the baseline. Model and data are those of scripts/quickstart.sh,
# which has to be run first (or others: DATA_DIR, MODEL_PATH).
set -euxo pipefail

HERE="$(dirname "$0")"
DATA_DIR="${DATA_DIR:-outputs/quickstart/data}"
MODEL_PATH="${MODEL_PATH:-$(echo outputs/quickstart/sft/global_step_*/huggingface)}"
OUT_DIR="${OUT_DIR:-outputs/entropy_tiny_cpu}"
WORKERS="${WORKERS:-1}"
source "$HERE/../../examples/settings.sh"
LOSS="${LOSS:-kl_cov}"
case "$LOSS" in # a mini-batch here has some thousand tokens, so that the shares of the paper would choose one of them
    kl_cov) OPTIONS=(actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.02 actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1) ;;
    clip_cov) OPTIONS=(actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.02) ;;
    *) OPTIONS=() ;;
esac

python3 -m "recipe.$(basename "$HERE").main_entropy" "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=20 \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=16 \
    data.gen_batch_size=24 \
    data.max_prompt_length=16 \
    data.max_response_length=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.policy_loss.loss_mode="$LOSS" \
    ${OPTIONS[@]+"${OPTIONS[@]}"} \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
    actor_rollout_ref.rollout.n=16 \
    trainer.project_name=quickstart \
    trainer.experiment_name="entropy_$LOSS" \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.total_training_steps=40 \
    trainer.test_freq=5 \
    "$@"
