#!/usr/bin/env bash
# GRPO on whole conversations with a simulated user: Qwen2.5-7B-Instruct on mathematical problems, one node of 8 GPUs; not run so far.
# Data first: python3 -m recipe.collabllm.process_dataset, into ~/data/collabllm-math-hard/rl. User and judge: README.md
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/collabllm-math-hard/rl}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}"
JUDGE_MODEL="${JUDGE_MODEL:-gpt-4o-mini}"
JUDGE_BASE_URL="${JUDGE_BASE_URL:-https://api.openai.com/v1}"
export USER_BASE_URL="${USER_BASE_URL:-https://api.openai.com/v1}"
HERE="$(dirname "$0")"
source "$HERE/../../examples/settings.sh"

python3 -m verl.trainer.main_ppo "${RUN[@]}" "${GRPO[@]}" \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/validation.parquet" \
    data.return_raw_chat=true \
    data.train_batch_size=16 \
    data.max_prompt_length=8196 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.multi_turn.enable=true \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=5 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6 \
    actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3 \
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$HERE/config/collabllm_interaction_config.yaml" \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$HERE/config/agent.yaml" \
    actor_rollout_ref.rollout.agent.default_agent_loop=collabllm_agent \
    reward_model.reward_manager=collabllm \
    +reward_model.reward_kwargs.metric_weights.accuracy=1 \
    +reward_model.reward_kwargs.metric_weights.interactivity=1 \
    +reward_model.reward_kwargs.metric_weights.token_amount=-0.0001 \
    +reward_model.reward_kwargs.llm_judge_kwargs.model="$JUDGE_MODEL" \
    +reward_model.reward_kwargs.llm_judge_kwargs.base_url="$JUDGE_BASE_URL" \
    +reward_model.reward_kwargs.llm_judge_kwargs.max_tokens=2048 \
    +reward_model.reward_kwargs.llm_judge_kwargs.temperature=0 \
    custom_reward_function.path="$HERE/reward_function.py" \
    custom_reward_function.name=conversation_level_reward_func \
    trainer.project_name=verl_collabllm \
    trainer.experiment_name=qwen2.5-7b-math-hard \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=100 \
    trainer.test_freq=10 \
    trainer.total_epochs=20 \
    "$@"
