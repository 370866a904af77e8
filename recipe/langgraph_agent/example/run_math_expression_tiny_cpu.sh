#!/usr/bin/env bash
# The whole example on CPU: expressions, a tiny Qwen2 with random weights, supervised conversations that show the call, GRPO.
set -euxo pipefail

HERE="$(dirname "$(dirname "$0")")"
OUT_DIR="${OUT_DIR:-outputs/langgraph_agent}"
WORKERS="${WORKERS:-1}"
SFT_STEPS="${SFT_STEPS:-400}"
AGENT="${AGENT:-math_expression}"  # or math_expression_endpoint: an agent that reaches the model through the endpoint
WORDS=($'<tool_call>\n{"name": "calculate", "arguments": {"a": ' ', "b": ' ', "operand": "' $'"}}\n</tool_call>' '\boxed{')  # a token each
source "$(dirname "$0")/../../../examples/settings.sh"

if [ ! -f "$OUT_DIR/sft/latest_checkpointed_iteration.txt" ]; then
    python3 -m "recipe.$(basename "$HERE").example.create_dataset" --local_save_dir "$OUT_DIR/data" --largest 99 --short --agent "$AGENT" --direct 0.6 --sft_size 4096 --test_size 128
    python3 examples/tiny_model.py --save-dir "$OUT_DIR/base" --seed 1 --words "${WORDS[@]}"
    python3 -m verl.trainer.sft_trainer "${SFT_CPU[@]}" \
        data.train_files="$OUT_DIR/data/sft.parquet" \
        data.train_batch_size=64 \
        data.max_length=64 \
        model.path="$OUT_DIR/base" \
        optim.lr=3e-3 \
        trainer.project_name=langgraph_agent \
        trainer.default_local_dir="$OUT_DIR/sft" \
        trainer.total_training_steps="$SFT_STEPS"
fi

python3 -m verl.trainer.main_ppo "${CPU[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT_DIR/data/train.parquet" \
    data.val_files="$OUT_DIR/data/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=16 \
    data.max_response_length=48 \
    actor_rollout_ref.model.path="$OUT_DIR/sft/global_step_$SFT_STEPS/huggingface" \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$HERE/example/agent.yaml" \
    trainer.project_name=langgraph_agent \
    trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT_DIR/grpo" \
    trainer.total_training_steps=20 \
    trainer.test_freq=10 \
    "$@"
