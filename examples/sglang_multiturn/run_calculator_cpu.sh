#!/usr/bin/env bash
# A tiny model learns to use a calculator, on CPU: supervised rows teach what a call looks like, GRPO with tool_agent when to make it.
# Validates three times: before GRPO, after it, and after it without the tool. ENGINE is vllm or sglang. Arguments: overrides of GRPO.
set -euxo pipefail

ENGINE="${ENGINE:-vllm}"
OUT_DIR="${OUT_DIR:-outputs/calculator}"
STEPS="${STEPS:-20}"
SFT_STEPS="${SFT_STEPS:-300}"
TASK=examples/sglang_multiturn/calculator
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
source "$(dirname "$0")/../settings.sh"

python3 "$TASK/make_task.py" --save-dir "$OUT_DIR"

python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
    "data.train_files='$OUT_DIR/data/sft_train.parquet'" \
    "data.val_files='$OUT_DIR/data/sft_test.parquet'" \
    data.train_batch_size=64 \
    data.max_length=48 \
    "model.path='$OUT_DIR/model'" \
    optim.lr=3e-3 \
    trainer.project_name=calculator \
    "trainer.default_local_dir='$OUT_DIR/sft'" \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.test_freq=100

COMMON=(
    "${CPU[@]}"
    --config-path=examples/sglang_multiturn/config
    --config-name=gsm8k_multiturn_grpo
    algorithm.adv_estimator=grpo
    "data.train_files='$OUT_DIR/data/train.parquet'"
    "data.val_files='$OUT_DIR/data/test.parquet'"
    data.train_batch_size=16
    data.max_prompt_length=16
    data.max_response_length=32
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable
    custom_reward_function.path="$TASK/reward.py"
    trainer.project_name=calculator
)

python3 -m verl.trainer.main_ppo "${COMMON[@]}" \
    "actor_rollout_ref.model.path='$(echo "$OUT_DIR"/sft/global_step_*/huggingface)'" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$TASK/tools.yaml" \
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
