#!/usr/bin/env bash
# A script on several machines by Open MPI's mpirun, which logs in to each by ssh and starts the processes there.
#
#     launch/mpirun.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#     HOSTS=10.0.0.1:8,10.0.0.2:8 launch/mpirun.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#     kill -USR1 PID    # of that mpirun, which hands it on: all processes of 06_imagenet.py save and end
#
# 06_imagenet.py, or a script of your own that calls setup_distributed(): it reads what mpirun tells each process. With
# the Python environment active; that, the repository and the data lie at the same path on all machines. Edit the lines
# below, or set them for one run as above.
hosts=${HOSTS:-localhost:2}  # machines, and after the colon how many processes on each: one a GPU; rank 0 on the first
hostfile=${HOSTFILE:-}       # or a file with a line for each machine, as: 10.0.0.1 slots=8
master=${MASTER:-}           # the first machine, as the others reach it; empty: as it is named above
port=${PORT:-}               # a free one there; empty: one made from the job's name, so that two jobs do not meet
interface=${INTERFACE:-}     # what the machines reach each other by, as eth0; empty: found by the machine's name

set -euo pipefail

fail() {
    echo "mpirun.sh: error: $1" >&2
    exit 2
}

if (($# == 0)); then
    fail "no script given: expected one and its flags; launch/mpirun.sh 06_imagenet.py data/imagenet --resume"
fi
found=$(mpirun --version 2>&1 | head -n 1) || true
if [[ $found != *"Open MPI"* && $found != *OpenRTE* ]]; then
    fail "mpirun is '$found': expected Open MPI's, as others have other options; apt-get install openmpi-bin"
fi

where=(--host "$hosts")
first=${hosts%%,*}
if [[ -n $hostfile ]]; then
    where=(--hostfile "$hostfile")
    first=$(grep -Eom1 '^[[:space:]]*[^#[:space:]]+' "$hostfile" 2>/dev/null | tr -d '[:space:]') ||
        fail "HOSTFILE=$hostfile: expected a file with a line for each machine, as: 10.0.0.1 slots=8"
fi
export MASTER_ADDR=${master:-${first%%:*}}

# mpirun hands on its own variables and those that are named to it.
variables=(-x MASTER_ADDR -x PATH)
if [[ -n $port ]]; then
    export MASTER_PORT=$port
    variables+=(-x MASTER_PORT)
fi
# A name that /etc/hosts gives to 127.0.1.1, as Debian does, would send the others to themselves.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
    variables+=(-x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME)
fi

# --bind-to none: mpirun would bind each process to one core, or to some, and its loader processes and threads with it;
# setup_distributed() shares out the cores by itself.
# No number of processes: as many as the machines have slots. If one fails, mpirun ends the others.
exec mpirun "${where[@]}" "${variables[@]}" --bind-to none "$(command -v python)" "$@"
