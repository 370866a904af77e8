#!/usr/bin/env bash
# vLLM, weight sync and training on one GPU for the first time: 15 minutes, then a table for docs/perf/gpu.md.
# Options: python scripts/first_day.py --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" scripts/first_day.py gpu "$@"
