#!/usr/bin/env bash
# Responses for the problems of the evaluation on rollout servers, one node of 8 GPUs; not run so far.
set -euxo pipefail

DATA_FILE="${DATA_FILE:-data/open_math_reasoning/eval_dataset.parquet}"
OUTPUT_PATH="${OUTPUT_PATH:-responses.parquet}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-8B}"
NNODES="${NNODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
GEN_TP="${GEN_TP:-1}"
N="${N:-16}"

python3 -m verl.trainer.main_generation_server \
    trainer.nnodes="$NNODES" \
    trainer.n_gpus_per_node="$GPUS_PER_NODE" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n="$N" \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=0.7 \
    actor_rollout_ref.rollout.prompt_length=2048 \
    actor_rollout_ref.rollout.response_length=20480 \
    actor_rollout_ref.rollout.max_num_batched_tokens=32768 \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 \
    data.train_files="$DATA_FILE" \
    +data.output_path="$OUTPUT_PATH" \
    "$@"
