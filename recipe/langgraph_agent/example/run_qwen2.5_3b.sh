#!/usr/bin/env bash
# GRPO of Qwen2.5-3B-Instruct on expressions that need the tool, one node of 8 GPUs; not run so far.
set -euxo pipefail

HERE="$(dirname "$(dirname "$0")")"
DATA_DIR="${DATA_DIR:-$HOME/data/math_expression_tool}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}"
NNODES="${NNODES:-1}"

python3 -m "recipe.$(basename "$HERE").example.create_dataset" --local_save_dir "$DATA_DIR"
source "$(dirname "$0")/../../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.return_raw_chat=true \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$HERE/example/agent.yaml" \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=langgraph_agent \
    trainer.experiment_name=qwen2.5_3b \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    trainer.total_epochs=1 \
    "$@"
