#!/usr/bin/env bash
# 06_imagenet.py on this machine: a process on each GPU, or without GPUs on each core.
#
#     launch/06_one_node.sh data/imagenet @recipes/resnet50.args
#
# With the Python environment active. Edit the lines below, or set them for one run: PROCESSES=2 launch/06_one_node.sh ...
processes=${PROCESSES:-auto}  # a number; auto: as many as GPUs, or else cores
restarts=${RESTARTS:-10}      # how often to go on from the newest checkpoint after a process has failed

set -euo pipefail

# Without this variable processes that are restarted may look for those that have failed.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --standalone: a port of its own, so that several jobs on one machine do not meet.
# --resume: a restart goes on from the newest checkpoint, and so does this command when it is given again.
exec torchrun --standalone --nproc-per-node="$processes" --max-restarts="$restarts" \
    "$(dirname "$0")/../06_imagenet.py" "$@" --resume
