#!/usr/bin/env bash
# PPO with a critic and a code interpreter: the 32B model of run_qwen2-32b_sft.sh on DAPO-Math-17k, 8 nodes of 8 GPUs with 80 GB.
# Data first: hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir ~/data/DAPO-Math-17k, and yentinglin/aime_2025 to ~/data/aime_2025
set -euo pipefail

export MODEL_PATH="${MODEL_PATH:-checkpoints/retool/qwen2.5-32b-sft/global_step_372/huggingface}"
tokens=$((2048 + 16384))
bash "$(dirname "$0")/run_qwen2-32b_dapo.sh" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=1024 \
    data.max_response_length=16384 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$tokens" \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$((4 * tokens))" \
    critic.model.path="$MODEL_PATH" \
    critic.model.use_remove_padding=true \
    critic.model.fsdp_config.param_offload=true \
    critic.model.fsdp_config.optimizer_offload=true \
    critic.optim.lr=2e-6 \
    critic.optim.lr_warmup_steps=10 \
    critic.use_dynamic_bsz=true \
    critic.ppo_mini_batch_size=256 \
    critic.ppo_max_token_len_per_gpu="$((2 * tokens))" \
    critic.ulysses_sequence_parallel_size=8 \
    trainer.critic_warmup=20 \
    trainer.experiment_name=qwen2.5-32b_ppo \
    "$@"
