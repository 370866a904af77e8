#!/usr/bin/env bash
# Eight GPUs for the first time: two hours, from collectives to large models; stops at the first failure.
# Writes a table for docs/perf/gpu.md.
# Options: python scripts/first_day.py --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" scripts/first_day.py node "$@"
