#!/usr/bin/env bash
# Supervised fine-tuning on worked counts: SmolLM2-135M-Instruct, one GPU.
# Data first: python3 recipe/char_count/create_dataset.py
set -euxo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data/char_count}"
MODEL_PATH="${MODEL_PATH:-HuggingFaceTB/SmolLM2-135M-Instruct}"
OUT_DIR="${OUT_DIR:-models/sft}"
WORKERS="${WORKERS:-1}"

torchrun --standalone --nnodes=1 --nproc_per_node="$WORKERS" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA_DIR/sft/train.parquet" \
    data.val_files="$DATA_DIR/sft/test.parquet" \
    data.prompt_key=prompt \
    data.response_key=response \
    data.train_batch_size=256 \
    data.micro_batch_size_per_gpu=8 \
    data.max_length=256 \
    model.partial_pretrain="$MODEL_PATH" \
    use_remove_padding=true \
    trainer.default_local_dir="$OUT_DIR" \
    trainer.checkpoint.save_contents='[model,optimizer,extra,hf_model]' \
    trainer.project_name=char_count-sft \
    trainer.experiment_name=char_count-sft-SmolLM2-135M-Instruct \
    trainer.logger='[console]' \
    trainer.total_epochs=3 \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=after_each_epoch \
    "$@"
