#!/usr/bin/env bash
# 06_imagenet.py on a fixed number of machines, each of which is told its number: 0, 1 and so on.
#
#     launch/06_static.sh 0 data/imagenet @recipes/resnet50.args    # on the machine named below
#     launch/06_static.sh 1 data/imagenet @recipes/resnet50.args    # on the other
#
# With the Python environment active. Edit the lines below, alike on all machines.
master=${MASTER:-10.0.0.1}    # machine 0, as the others reach it
port=${PORT:-29500}           # a free one there, and open to the others
nodes=${NODES:-2}             # machines
processes=${PROCESSES:-auto}  # on each: a number; auto: as many as GPUs, or else cores
interface=${INTERFACE:-}      # what the machines reach each other by, as eth0; empty: found by the machine's name

set -euo pipefail

node_rank=${1:-}
if ! [[ $node_rank =~ ^[0-9]+$ && $node_rank -lt $nodes ]]; then
    echo "06_static.sh: error: number '$node_rank' of a machine: expected 0 to $((nodes - 1)) before the flags of 06" >&2
    exit 2
fi
shift

# A name that /etc/hosts gives to 127.0.1.1, as Debian does, would send the others to themselves.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

# No --max-restarts: with fixed machines one torchrun's restart is unknown to the others. If one fails, all end; then
# give the same commands again: --resume goes on from the newest checkpoint. 06_elastic.sh does that by itself.
exec torchrun --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node="$processes" \
    --master-addr="$master" --master-port="$port" \
    "$(dirname "$0")/../06_imagenet.py" "$@" --resume
