#!/usr/bin/env bash
# Training on one GPU: tokens/s, share of the peak (MFU) and peak memory of a 0.1B and a 1B model, with and without the
# chunked head; that packed documents stay apart there; and that a resumed run repeats an uninterrupted one.
# Under 8 minutes. Needs torch, transformers, accelerate, safetensors and numpy, and this repository; nothing is fetched.
#
#   tests/benchmarks/gpu.sh            on a GPU
#   tests/benchmarks/gpu.sh --tiny     tiny models, also on a CPU: whether the script works
set -euo pipefail
cd "$(dirname "$0")/../.."
export CUBLAS_WORKSPACE_CONFIG=:4096:8 HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m tests.benchmarks._gpu "$@"
