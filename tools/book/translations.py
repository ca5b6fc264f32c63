"""What the flags of torchrun are for, in our words."""

# A test compares the names with those of torchrun's own parser.
TORCHRUN = {
    "--nnodes": "number of machines, 2; or from the fewest to the most, 1:4",
    "--nproc-per-node": "processes per machine: a number, gpu, cpu, xpu, or auto",
    "--node-rank": "number of this machine, from 0; only for a fixed number of machines",
    "--master-addr": "name or address of machine 0; only for a fixed number of machines",
    "--master-port": "port on machine 0, 29500 unless given; only for a fixed number of machines",
    "--standalone": "one machine, and a free port: for several jobs on one machine",
    "--rdzv-backend": (
        "how machines find each other: "
        "static (with --node-rank) or c10d (machines may join and exit)"
    ),
    "--rdzv-endpoint": "HOST:PORT of the store of the rendezvous",
    "--rdzv-id": "name of the job, the same on all machines and different for each job",
    "--rdzv-conf": "settings of the rendezvous: is_host=1, join_timeout=600",
    "--max-restarts": "how often torchrun restarts all processes after a failure",
    "--monitor-interval": "seconds between two checks of the processes",
    "--start-method": (
        "how Python starts processes: spawn, fork or forkserver; scripts are unaffected"
    ),
    "--role": "a name for these processes in messages",
    "--module": "start a module, as python -m does: torchrun --module package.train",
    "--no-python": "start a program that is not a Python script",
    "--run-path": "run the script within the interpreter of the worker, from its absolute path",
    "--log-dir": "folder for the output of each process",
    "--redirects": (
        "write output to files instead of the terminal: "
        "3 is both streams of all, 1:3 those of local rank 1"
    ),
    "--tee": "write output to files and to the terminal; values as for --redirects",
    "--log-line-prefix-template": "prefix of each line of --tee: '${hostname}:${rank}: '",
    "--local-ranks-filter": "show only the output of these local ranks: 0,1",
    "--local-addr": (
        "address of this machine, if its name does not resolve to one that others reach"
    ),
    "--numa-binding": "bind processes to the cores near their GPU",
    "--signals-to-handle": "signals that torchrun forwards to the processes",
    "--shutdown-timeout": "seconds from SIGTERM to SIGKILL, 30 unless given",
    "--virtual-local-rank": "each process sees one GPU and local rank 0",
    "--event-log-handler": "for developers of launchers: where events go",
    "--logs-specs": "for developers of launchers: a class that decides where output goes",
    "--duplicate-stdout-filters": (
        "copy lines of standard output that contain these words to a file"
    ),
    "--duplicate-stderr-filters": "the same for standard error",
}
