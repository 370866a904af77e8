#!/usr/bin/env bash
# Download DAPO-Math-17k (training) and AIME 2024 (validation) to where the launch scripts look for them.
# OVERWRITE=1 downloads again what is there.
set -euo pipefail

RAY_DATA_HOME="${RAY_DATA_HOME:-$HOME/verl}"
TRAIN_FILE="${TRAIN_FILE:-$RAY_DATA_HOME/data/dapo-math-17k.parquet}"
TEST_FILE="${TEST_FILE:-$RAY_DATA_HOME/data/aime-2024.parquet}"
HUB="${HF_ENDPOINT:-https://huggingface.co}/datasets/BytedTsinghua-SIA"

fetch() {
    local url="$1" file="$2"
    if [ -f "$file" ] && [ "${OVERWRITE:-0}" != 1 ]; then
        echo "$file is there"
        return
    fi
    mkdir -p "$(dirname "$file")"
    curl --fail --location --retry 5 --output "$file.part" "$url"
    mv "$file.part" "$file"
    echo "wrote $file"
}

fetch "$HUB/DAPO-Math-17k/resolve/main/data/dapo-math-17k.parquet" "$TRAIN_FILE"
fetch "$HUB/AIME-2024/resolve/main/data/aime-2024.parquet" "$TEST_FILE"
