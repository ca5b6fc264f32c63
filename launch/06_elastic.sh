#!/usr/bin/env bash
# 06_imagenet.py on machines that come and go: the same command on each of them, now or hours later.
#
#     python launch/store.py                                       # once, on the machine that `store` names
#     launch/06_elastic.sh data/imagenet @recipes/resnet50.args    # on each machine that is to train
#
# With the Python environment active. Edit the lines below, alike on all machines.
store=${STORE:-10.0.0.1:29400}  # where launch/store.py runs, best on a machine that does not train
job=${JOB:-resnet50}            # any name; a new one, or a new store, for each job
nodes=${NODES:-1:4}             # machines: the fewest to train with, and the most
processes=${PROCESSES:-auto}    # on each: a number; auto: as many as GPUs, or else cores
restarts=${RESTARTS:-20}        # failures of processes that one torchrun outlives; one more ends the job everywhere
tries=${TRIES:-10}              # how often to start torchrun again, if it ends within ten minutes each time
pause=${PAUSE:-10}              # seconds before that
interval=${INTERVAL:-5}         # seconds between signs of life; a machine without three of them in a row is given up
last_call=${LAST_CALL:-15}      # seconds to wait for more machines when there are fewer than the most
interface=${INTERFACE:-}        # what the machines reach each other by, as eth0; empty: found by the machine's name
address=${ADDRESS:-}            # this machine's, if the others cannot resolve its name

set -euo pipefail

# Without this variable processes that are restarted look for those that are gone, and wait for minutes or for good.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# A name that /etc/hosts gives to 127.0.1.1, as Debian does, would send the others to themselves.
if [[ -n $interface ]]; then
    export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
fi

settings=is_host=0  # no torchrun keeps the store, not even one on its machine
settings+=,keep_alive_interval=$interval,keep_alive_max_attempt=3
settings+=,last_call_timeout=$last_call
settings+=,join_timeout=604800  # a week until there are the fewest: torchrun's own 10 minutes would end the job

# Where torchrun writes the error that has ended it.
error=$(mktemp)
trap 'rm -f "$error"' EXIT

# One signal, to torchrun alone, which ends its processes, which save first: so a group of its own, as Ctrl-C reaches
# all of a group, and a second signal would end torchrun before that.
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

# torchrun outlives its processes. It is started again when it was killed, or has lost the store: that was away, or this
# machine was cut off.
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
        echo "06_elastic.sh: job $job is over: it is done, or has used up its $restarts restarts on some machine;" \
            "to go on, say JOB=another-name on all machines" >&2
        exit 1
    fi
    if ((SECONDS - begin > 600)); then
        left=$tries
    fi
    if ((left-- == 0)); then
        echo "06_elastic.sh: error: torchrun ended with code $code, after $tries tries: giving up" >&2
        exit "$code"
    fi
    echo "06_elastic.sh: torchrun ended with code $code; again in $pause s, $left more tries" >&2
    sleep "$pause" &
    wait "$!"  # a signal ends this at once
done
