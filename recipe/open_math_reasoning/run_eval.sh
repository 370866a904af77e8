#!/usr/bin/env bash
# Score the responses to AIME 2024 and AIME 2025.
set -euxo pipefail

HERE="$(dirname "$0")"
OUTPUT="${OUTPUT:-$HOME/data/open_math_reasoning/gen/responses.parquet}"

python3 -m verl.trainer.main_eval \
    data.path="$OUTPUT" \
    custom_reward_function.path="$HERE/compute_score.py" \
    custom_reward_function.name=compute_score_data_source \
    "$@"
