#!/usr/bin/env bash
# Run 06_imagenet.py on this machine: one process per GPU, or one per core if there is no GPU.
#
#     launch/06_one_node.sh data/imagenet @recipes/resnet50.args
#
# Activate the Python environment first. Edit the lines below, or set them for one run:
# PROCESSES=2 launch/06_one_node.sh ...
processes=${PROCESSES:-auto}  # a number, or auto: one per GPU, without GPUs one per core
restarts=${RESTARTS:-10}      # how often to resume from the newest checkpoint after a process has failed

set -euo pipefail  # stop at the first error

# Without this variable, restarted processes look for the store of the old processes, and may hang: see docs/elastic.md.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --standalone: choose a free port, so that several jobs can run on one machine.
# --resume: continue from the newest checkpoint, after a restart and when this command is run again.
exec torchrun --standalone --nproc-per-node="$processes" --max-restarts="$restarts" \
    "$(dirname "$0")/../06_imagenet.py" "$@" --resume
