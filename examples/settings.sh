# Settings that launch scripts share. A script sources this file and passes the arrays that fit, then its own settings:
# of two values for one key the later wins. Everything else has the default of the configuration.
{ set +x; } 2> /dev/null # the command, which is printed, shows every setting

ENGINE="${ENGINE:-vllm}" # the rollout engine, which an argument without a key may name too
for argument in "$@"; do
    shift
    case "$argument" in
        vllm | sglang | hf) ENGINE="$argument" ;;
        *) set -- "$@" "$argument" ;;
    esac
done

DATA_DIR="${DATA_DIR:-$HOME/data}"
RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
TRAIN_FILE="${TRAIN_FILE:-$RAY_DATA_HOME/data/dapo-math-17k.parquet}"
TEST_FILE="${TEST_FILE:-$RAY_DATA_HOME/data/aime-2024.parquet}"

# ---- data

GSM8K=(
    data.train_files="$DATA_DIR/gsm8k/train.parquet"
    data.val_files="$DATA_DIR/gsm8k/test.parquet"
)
GSM8K_MATH=(
    data.train_files="['$DATA_DIR/gsm8k/train.parquet','$DATA_DIR/math/train.parquet']"
    data.val_files="['$DATA_DIR/gsm8k/test.parquet','$DATA_DIR/math/test.parquet']"
)
GEO3K=(
    data.train_files="$DATA_DIR/geo3k/train.parquet"
    data.val_files="$DATA_DIR/geo3k/test.parquet"
)
DAPO_MATH=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.truncation=left
    data.max_prompt_length=2048
)

# ---- algorithm

GRPO=( # with a KL loss against the reference
    algorithm.adv_estimator=grpo
    data.max_response_length=1024
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.fsdp_config.param_offload=true
)
DAPO=( # without dynamic sampling and overlong penalty, which have keys of their own
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.rollout.name="$ENGINE"
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    reward_model.reward_manager=dapo
)

# ---- devices

RUN=( # on GPUs or NPUs
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.rollout.name="$ENGINE"
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
OFFLOAD=(
    actor_rollout_ref.actor.fsdp_config.param_offload=true
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
)
CPU=( # small models in fp32 on one core
    data.dataloader_num_workers=0
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.use_prefix_sharing=true
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.rollout.name="$ENGINE"
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.enforce_eager=true
    actor_rollout_ref.rollout.calculate_log_probs=true
    trainer.device=cpu
    trainer.n_gpus_per_node="${WORKERS:-1}"
    trainer.logger='[]'
    trainer.save_freq=20
    trainer.total_epochs=1000
)
SFT_CPU=( # verl.trainer.sft_trainer, the warm-up of a tiny model
    model.use_remove_padding=true
    model.enable_gradient_checkpointing=false
    optim.lr_scheduler_type=cosine
    optim.lr_warmup_steps_ratio=0.1
    checkpoint.save_contents='[hf_model]'
    trainer.device=cpu
    trainer.logger='[]'
    trainer.experiment_name=sft
    trainer.total_epochs=1000
    trainer.save_freq=1000
    trainer.max_ckpt_to_keep=1
)

set -x
