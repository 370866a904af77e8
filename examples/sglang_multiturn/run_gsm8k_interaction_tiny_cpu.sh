#!/usr/bin/env bash
# GRPO of a tiny model on sums, on CPU, with a user who says whether an answer is right: supervised rows teach the form of a second attempt, GRPO the rest.
# Arguments: overrides of GRPO.
set -euxo pipefail

OUT_DIR="${OUT_DIR:-outputs/gsm8k_interaction}"
STEPS="${STEPS:-30}"
SFT_STEPS="${SFT_STEPS:-200}"
TASK=examples/sglang_multiturn/sums
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
source "$(dirname "$0")/../settings.sh"

if [ ! -f "$OUT_DIR/sft/latest_checkpointed_iteration.txt" ]; then
    python3 "$TASK/make_task.py" --save-dir "$OUT_DIR"
    python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
        "data.train_files='$OUT_DIR/data/sft_train.parquet'" \
        "data.val_files='$OUT_DIR/data/sft_test.parquet'" \
        data.train_batch_size=64 \
        data.max_length=96 \
        "model.path='$OUT_DIR/model'" \
        optim.lr=3e-3 \
        trainer.project_name=gsm8k_interaction \
        "trainer.default_local_dir='$OUT_DIR/sft'" \
        trainer.total_training_steps="$SFT_STEPS" \
        trainer.test_freq=100
fi

python3 -m verl.trainer.main_ppo --config-path=examples/sglang_multiturn/config --config-name=gsm8k_multiturn_grpo_w_interaction "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    "data.train_files='$OUT_DIR/data/train.parquet'" \
    "data.val_files='$OUT_DIR/data/test.parquet'" \
    data.train_batch_size=16 \
    data.max_prompt_length=16 \
    data.max_response_length=64 \
    "actor_rollout_ref.model.path='$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface'" \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \
    actor_rollout_ref.rollout.multi_turn.interaction_config_path=examples/sglang_multiturn/config/interaction_config/gsm8k_interaction_config.yaml \
    trainer.project_name=gsm8k_interaction \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir='$OUT_DIR/grpo'" \
    "trainer.validation_data_dir='$OUT_DIR/grpo/validation'" \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=10 \
    trainer.save_freq=-1 \
    "$@"
