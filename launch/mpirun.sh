#!/usr/bin/env bash
# Run a script on several machines with Open MPI's mpirun, which starts the processes on each machine through ssh.
#
#     launch/mpirun.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#     HOSTS=10.0.0.1:8,10.0.0.2:8 launch/mpirun.sh 06_imagenet.py data/imagenet @recipes/resnet50.args --resume
#     kill -USR1 PID    # PID of mpirun, which forwards the signal: all processes of 06_imagenet.py save and exit
#
# The script is 06_imagenet.py, or your own script that calls setup_distributed(), which reads mpirun's variables.
# Activate the Python environment first. The environment, the repository and the data must have the same path on all
# machines. Edit the lines below, or set them for one run as above.
hosts=${HOSTS:-localhost:2}  # machine:processes for each machine, one process per GPU; rank 0 runs on the first machine
hostfile=${HOSTFILE:-}       # or a file with one line per machine, such as: 10.0.0.1 slots=8
master=${MASTER:-}           # the first machine, as the other machines reach it; empty: its name in the list above
port=${PORT:-}               # a free port on the first machine; empty: MASTER_PORT, or 12000 to 31999 by process ID
interface=${INTERFACE:-}     # network interface between the machines, such as eth0; empty: see below

set -euo pipefail  # stop at the first error

fail() {
    echo "mpirun.sh: error: $1" >&2
    exit 2
}

if (($# == 0)); then
    fail "no script given: expected a script and its flags; launch/mpirun.sh 06_imagenet.py data/imagenet --resume"
fi
version=$(mpirun --version 2>&1 | head -n 1) || true
if [[ $version != *"Open MPI"* && $version != *OpenRTE* ]]; then
    fail "mpirun is '$version': expected Open MPI, because others take other options; apt-get install openmpi-bin"
fi

host_options=(--host "$hosts")
first=${hosts%%,*}
if [[ -n $hostfile ]]; then
    host_options=(--hostfile "$hostfile")
    first=$(grep -Eom1 '^[[:space:]]*[^#[:space:]]+' "$hostfile" 2>/dev/null | tr -d '[:space:]') ||
        fail "HOSTFILE=$hostfile: expected a file with one line per machine, such as: 10.0.0.1 slots=8"
fi
export MASTER_ADDR=${master:-${first%%:*}}

export MASTER_PORT=${port:-${MASTER_PORT:-$((12000 + $$ % 20000))}}  # another one for each job on this machine
# If `interface` is empty, gloo uses the interface of the address to which the host name resolves, and NCCL chooses one
# itself. Set `interface` where /etc/hosts maps the host name to 127.0.1.1, as on Debian: other machines cannot connect
# to this address.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi
# To the other machines, mpirun passes only its own variables and the variables named with -x.
variables=(-x MASTER_ADDR -x PATH)
for name in $(compgen -e); do  # the exported variables
    if [[ $name =~ ^(MASTER_PORT|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|NCCL_.*)$ ]]; then
        variables+=(-x "$name")
    fi
done

# --bind-to none: by default mpirun binds each process, its threads and its loader processes to one core or a few.
# setup_distributed() divides the cores among the processes.
# No -np: mpirun starts as many processes as the machines have slots. If one process fails, it ends the others.
exec mpirun "${host_options[@]}" "${variables[@]}" --bind-to none "$(command -v python)" "$@"
