#!/usr/bin/env bash
# Run 06_imagenet.py on machines that may join, exit or fail at any time. Run the same command on each machine.
#
#     python launch/store.py                                       # once, preferably on a machine that does not train
#     launch/06_elastic.sh data/imagenet @recipes/resnet50.args    # on each machine that trains
#
# Activate the Python environment first. Edit the lines below, or set them for one run:
# STORE=10.0.0.5:29400 launch/06_elastic.sh ...
# They must be the same on all machines, except `interface` and `address`.
store=${STORE:-10.0.0.1:29400}  # address of launch/store.py, the small server at which the machines find each other
job=${JOB:-resnet50}            # any name; take a new name, or a new store, for each job
nodes=${NODES:-1:4}             # minimum and maximum number of machines
processes=${PROCESSES:-auto}    # processes per machine: a number, or auto: one per GPU, without GPUs one per core
restarts=${RESTARTS:-20}        # failures after which a torchrun restarts its processes; one more ends the whole job
tries=${TRIES:-10}              # how often to start torchrun again if it ends within ten minutes each time
pause=${PAUSE:-10}              # seconds to wait before starting torchrun again
interval=${INTERVAL:-5}         # seconds between heartbeats ("still running"); a machine that misses three is removed
last_call=${LAST_CALL:-15}      # seconds to wait for more machines after the minimum number has joined
interface=${INTERFACE:-}        # network interface between the machines, such as eth0; empty: see below
address=${ADDRESS:-}            # address of this machine, if the other machines cannot resolve its name

set -euo pipefail  # stop at the first error

# Without this variable, restarted processes look for the store of the old processes, and may hang: see docs/elastic.md.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# If `interface` is empty, gloo uses the interface of the address to which the host name resolves, and NCCL chooses one
# itself. Set `interface` where /etc/hosts maps the host name to 127.0.1.1, as on Debian: other machines cannot connect
# to this address.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

settings=is_host=0  # no torchrun runs the store, not even the torchrun on the store's machine
settings+=,keep_alive_interval=$interval,keep_alive_max_attempt=3
settings+=,last_call_timeout=$last_call
settings+=,join_timeout=604800  # wait a week for the minimum number of machines; torchrun's default is 10 minutes

# torchrun writes the error that ended it to this file.
error=$(mktemp)
trap 'rm -f "$error"' EXIT

# Send one signal, to torchrun only: torchrun ends its processes, and they save first. A second signal would end
# torchrun too early. Ctrl-C reaches a whole process group, so torchrun gets its own group.
set -m
torchrun=
end() {
    trap '' INT TERM HUP
    if [[ -n $torchrun ]]; then
        kill -TERM "$torchrun" 2>/dev/null || true
        wait "$torchrun" || true
    fi
    exit "$1"
}
trap 'end 130' INT
trap 'end 143' TERM
trap 'end 129' HUP

# torchrun restarts its processes. This loop restarts torchrun, after it was killed or lost its connection to the store.
left=$tries
while true; do
    begin=$SECONDS
    : >"$error"
    TORCHELASTIC_ERROR_FILE=$error torchrun --nnodes="$nodes" --nproc-per-node="$processes" \
        --max-restarts="$restarts" ${address:+--local-addr="$address"} \
        --rdzv-backend=c10d --rdzv-id="$job" --rdzv-endpoint="$store" --rdzv-conf="$settings" \
        "$(dirname "$0")/../06_imagenet.py" "$@" --resume &
    torchrun=$!
    code=0
    wait "$torchrun" || code=$?
    torchrun=
    if [[ $code == 0 ]]; then
        exit 0
    fi
    if grep -q RendezvousClosedError "$error"; then
        echo "06_elastic.sh: job $job is closed: it has finished, or one machine has used up its $restarts restarts;" \
            "to continue the training, set JOB=another-name on all machines" >&2
        exit 1
    fi
    if ((SECONDS - begin > 600)); then
        left=$tries
    fi
    if ((left-- == 0)); then
        echo "06_elastic.sh: error: torchrun exited with code $code; giving up after $tries restarts" >&2
        exit "$code"
    fi
    echo "06_elastic.sh: torchrun exited with code $code; restarting in $pause s, $left more tries" >&2
    sleep "$pause" &
    wait "$!"  # unlike sleep in the foreground, this wait ends as soon as a signal arrives
done
