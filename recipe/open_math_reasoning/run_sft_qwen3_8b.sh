#!/usr/bin/env bash
# Supervised fine-tuning on long solutions, each sequence shared by two GPUs: Qwen3-8B-Base, one node of 8 GPUs with 80 GB (NNODES for more).
# Data first: python3 -m recipe.open_math_reasoning.prepare_nvidia-OpenMathReasoning_sft
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/open_math_reasoning}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B-Base}"
CKPTS_DIR="${CKPTS_DIR:-checkpoints/open_math_reasoning/qwen3-8b-sft}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"
WORKERS="${WORKERS:-8}"
SP_SIZE="${SP_SIZE:-2}"

torchrun --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$WORKERS" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    -m verl.trainer.sft_trainer \
    data.train_files="$DATA_DIR/cot_dataset.parquet" \
    data.train_batch_size=96 \
    data.max_length=32768 \
    data.truncation=right \
    data.max_token_len_per_gpu="$((32768 / SP_SIZE))" \
    model.path="$MODEL_PATH" \
    model.use_remove_padding=true \
    engine.strategy=fsdp2 \
    engine.ulysses_sequence_parallel_size="$SP_SIZE" \
    optim.lr=2e-5 \
    optim.lr_warmup_steps_ratio=0.01 \
    optim.lr_scheduler_type=cosine \
    optim.min_lr_ratio=0.1 \
    optim.weight_decay=0.1 \
    optim.betas='[0.9,0.95]' \
    checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
    trainer.logger='[console,wandb]' \
    trainer.project_name=open_math_reasoning \
    trainer.experiment_name=qwen3-8b-sft \
    trainer.default_local_dir="$CKPTS_DIR" \
    trainer.total_epochs=1 \
    trainer.save_freq=4000 \
    "$@"
