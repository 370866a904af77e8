#!/usr/bin/env bash
# A tiny model learns to run code, on CPU: supervised rows teach the form of a call, GRPO with the sandbox of this machine when to make it.
# Validates before, during and after GRPO, and at last without the tool. Arguments: overrides of GRPO.
set -euxo pipefail

HERE="$(dirname "$0")"
OUT_DIR="${OUT_DIR:-outputs/retool}"
STEPS="${STEPS:-20}"
SFT_STEPS="${SFT_STEPS:-300}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
source "$(dirname "$0")/../../examples/settings.sh"

if [ ! -f "$OUT_DIR/sft/latest_checkpointed_iteration.txt" ]; then
    python3 -m "recipe.$(basename "$HERE").powers.make_task" --save-dir "$OUT_DIR"
    python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
        "data.train_files='$OUT_DIR/data/sft_train.parquet'" \
        "data.val_files='$OUT_DIR/data/sft_test.parquet'" \
        data.train_batch_size=64 \
        data.max_length=96 \
        "model.path='$OUT_DIR/model'" \
        optim.lr=3e-3 \
        trainer.project_name=retool \
        "trainer.default_local_dir='$OUT_DIR/sft'" \
        trainer.total_training_steps="$SFT_STEPS" \
        trainer.test_freq=100
fi

COMMON=(
    "${CPU[@]}"
    algorithm.adv_estimator=grpo
    "data.train_files='$OUT_DIR/data/train.parquet'"
    "data.val_files='$OUT_DIR/data/test.parquet'"
    data.custom_cls.path="$HERE/retool.py"
    data.custom_cls.name=CustomRLHFDataset
    data.train_batch_size=16
    data.max_prompt_length=48
    data.max_response_length=48
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable
    custom_reward_function.path="$HERE/retool.py"
    trainer.project_name=retool
)

python3 -m verl.trainer.main_ppo "${COMMON[@]}" \
    "actor_rollout_ref.model.path='$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface'" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/powers/tools.yaml" \
    actor_rollout_ref.actor.checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
    trainer.experiment_name=grpo \
    "trainer.default_local_dir='$OUT_DIR/grpo'" \
    "trainer.validation_data_dir='$OUT_DIR/grpo/validation'" \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=10 \
    trainer.save_freq="$STEPS" \
    "$@"

python3 -m verl.trainer.main_ppo "${COMMON[@]}" \
    "actor_rollout_ref.model.path='$OUT_DIR/grpo/global_step_$STEPS/actor/huggingface'" \
    trainer.experiment_name=without_tool \
    "trainer.default_local_dir='$OUT_DIR/without_tool'" \
    trainer.val_only=true
