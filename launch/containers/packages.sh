#!/usr/bin/env bash
# Install what the scripts need, in an image. Dockerfile and apptainer.def both run this file.
set -euo pipefail

# libibverbs1, ibverbs-providers: NCCL loads libibverbs when it runs. Without it, NCCL uses TCP on an InfiniBand cluster,
# without a warning. g++: --compile needs a C++ compiler.
apt-get update
apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers g++
rm -rf /var/lib/apt/lists/*

# PyTorch's default build contains CUDA and NCCL. Only the GPU driver comes from the machine.
python -m pip install --no-cache-dir --requirement "$(dirname "$0")/requirements.txt"
