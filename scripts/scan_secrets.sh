#!/usr/bin/env bash
# Looks for keys, tokens and passwords in the tracked files; exit code 1 if there is one. Needs detect-secrets.
#
#   pip install detect-secrets==1.5.0 && bash scripts/scan_secrets.sh
#
# Rules by form only (keys of well-known services, private keys, passwords in URLs): entropy would report every digest.
# The tests of masking hold made secrets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git ls-files -z | xargs -0 detect-secrets-hook \
    --disable-plugin HexHighEntropyString --disable-plugin Base64HighEntropyString --disable-plugin KeywordDetector \
    --exclude-files '^tests/(utils/test_masking|trainer/run/test_launch)\.py$'
