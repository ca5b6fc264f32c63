#!/usr/bin/env bash
# Run 06_imagenet.py on a fixed number of machines. The first argument is the machine's number: 0, 1 and so on.
#
#     launch/06_static.sh 0 data/imagenet @recipes/resnet50.args    # on the machine named in `master`
#     launch/06_static.sh 1 data/imagenet @recipes/resnet50.args    # on the other machine
#
# Activate the Python environment first. Edit the lines below, or set them for one run:
# MASTER=10.0.0.5 launch/06_static.sh 0 ...
# They must be the same on all machines, except `interface`.
master=${MASTER:-10.0.0.1}    # name or address of machine 0, as the other machines reach it
port=${PORT:-29500}           # a free port on machine 0 that the other machines can reach
nodes=${NODES:-2}             # number of machines
processes=${PROCESSES:-auto}  # processes per machine: a number, or auto: one per GPU, without GPUs one per core
interface=${INTERFACE:-}      # network interface between the machines, such as eth0; empty: see below

set -euo pipefail  # stop at the first error

node_rank=${1:-}
if ! [[ $node_rank =~ ^[0-9]+$ && $node_rank -lt $nodes ]]; then
    echo "06_static.sh: error: machine number '$node_rank': expected 0 to $((nodes - 1)) as the first argument;" \
        "launch/06_static.sh 0 data/imagenet" >&2
    exit 2
fi
shift

# If `interface` is empty, gloo uses the interface of the address to which the host name resolves, and NCCL chooses one
# itself. Set `interface` where /etc/hosts maps the host name to 127.0.1.1, as on Debian: other machines cannot connect
# to this address.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

# No --max-restarts: torchrun could restart its own processes only; the processes on the other machines would not
# restart with them. If a process fails, everything exits. Run the same commands again: --resume continues from the
# newest checkpoint. 06_elastic.sh restarts by itself.
exec torchrun --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node="$processes" \
    --master-addr="$master" --master-port="$port" \
    "$(dirname "$0")/../06_imagenet.py" "$@" --resume
