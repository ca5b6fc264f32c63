#!/usr/bin/env bash
# Run a script on all machines of a SenseCore job: one torchrun per machine, which starts one process per GPU.
#
#     launch/sensecore.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#
# In SenseCore, create a distributed PyTorch job (AllReduce, not StandAlone) with this command. It must start in the
# repository, with the Python environment active. SenseCore runs it on every machine, and sets RANK, WORLD_SIZE,
# MASTER_ADDR and MASTER_PORT. This RANK and WORLD_SIZE count machines, not processes, so a script cannot use them
# directly. Edit the lines below.
processes=${PROCESSES:-auto}  # processes per machine: a number, or auto: one per GPU, without GPUs one per core
interface=${INTERFACE:-}      # network interface between the machines, such as eth0; empty: see below

set -euo pipefail  # stop at the first error

fail() {
    echo "sensecore.sh: error: $1" >&2
    exit 2
}

if (($# == 0)); then
    fail "no script given: expected a script and its flags; launch/sensecore.sh 06_imagenet.py data/imagenet --resume"
fi
try="to try it on one machine: RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 launch/sensecore.sh $*"
for name in RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    if [[ -z ${!name:-} ]]; then
        fail "$name is not set: SenseCore sets it for a job submitted with -d AllReduce, not -d StandAlone; $try"
    fi
done
# Otherwise a value that is not a number fails only minutes later, or leaves the machines waiting for each other.
if ! [[ $WORLD_SIZE =~ ^[1-9][0-9]*$ ]]; then
    fail "WORLD_SIZE=$WORLD_SIZE: expected the number of machines, 1 or more; $try"
fi
if ! [[ $RANK =~ ^(0|[1-9][0-9]*)$ && $RANK -lt $WORLD_SIZE ]]; then
    fail "RANK=$RANK: expected the number of this machine, 0 to $((WORLD_SIZE - 1)); $try"
fi
if [[ -n ${LOCAL_RANK:-} ]]; then
    fail "LOCAL_RANK=$LOCAL_RANK: expected no other launcher: sensecore.sh starts torchrun; launch/sensecore.sh $*"
fi

# If `interface` is empty, gloo uses the interface of the address to which the host name resolves, and NCCL chooses one
# itself. Set `interface` where /etc/hosts maps the host name to 127.0.1.1, as on Debian: other machines cannot connect
# to this address.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

# torchrun sets RANK and WORLD_SIZE again, now counting processes.
# No --max-restarts: torchrun could restart its own processes only; the processes on the other machines would not
# restart with them. If a process fails, everything exits, and you can start the job again with --resume.
exec torchrun --nnodes="$WORLD_SIZE" --node-rank="$RANK" --nproc-per-node="$processes" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
