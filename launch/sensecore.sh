#!/usr/bin/env bash
# A script on all machines of a SenseCore job: one torchrun on each, which starts a process on each GPU.
#
#     launch/sensecore.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#
# Give it to SenseCore as the command of a distributed PyTorch job, from the repository, with the Python environment
# active. It runs on every machine, and SenseCore sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for it. RANK and
# WORLD_SIZE count machines there, not processes, so a script cannot take them for its own. Edit the lines below.
processes=${PROCESSES:-auto}  # on each machine: a number; auto: as many as GPUs, or else cores
interface=${INTERFACE:-}      # what the machines reach each other by, as eth0; empty: found by the machine's name

set -euo pipefail

fail() {
    echo "sensecore.sh: error: $1" >&2
    exit 2
}

if (($# == 0)); then
    fail "no script given: expected one and its flags; launch/sensecore.sh 06_imagenet.py data/imagenet --resume"
fi
alone="RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 launch/sensecore.sh $*"
for name in RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    if [[ -z ${!name:-} ]]; then
        fail "$name is not set: expected SenseCore to set it on each machine; to try it on one: $alone"
    fi
done
# A value below that is no number would only fail minutes later, or let the machines wait for each other.
if ! [[ $WORLD_SIZE =~ ^[1-9][0-9]*$ ]]; then
    fail "WORLD_SIZE=$WORLD_SIZE: expected the number of machines, 1 or more; to try it on one: $alone"
fi
if ! [[ $RANK =~ ^(0|[1-9][0-9]*)$ && $RANK -lt $WORLD_SIZE ]]; then
    fail "RANK=$RANK: expected the number of this machine, 0 to $((WORLD_SIZE - 1)); to try it on one: $alone"
fi
if [[ -n ${LOCAL_RANK:-} ]]; then
    fail "LOCAL_RANK=$LOCAL_RANK: expected no launcher around this one, which starts torchrun itself; $*"
fi

# A name that /etc/hosts gives to 127.0.1.1, as Debian does, would send the others to themselves.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

# torchrun gives its processes a RANK and a WORLD_SIZE that count processes. No --max-restarts: with fixed machines one
# torchrun's restart is unknown to the others. If one fails, all end, and with --resume the job may be started again.
exec torchrun --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="$processes" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
