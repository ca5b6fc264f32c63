"""Let forked ranks run as if on two hosts, and note what each of them does.

A rank of helpers/ranks.py takes the name and the folder of its host before it runs the script. So a
start takes a second or two, not the seconds in which four processes import torch. Real hosts, with
networks of their own, are in tools/lab/hosts.py.
"""

import functools
import json
import multiprocessing
import os
import platform
import socket
import sys

from launchers import VARIABLES, srun

HOSTS = ["host1", "host2"]
CORES = 8  # of each host, as 06 sees it


def enter(disks, notes, then, rank):
    """Be on a host, which is the first act of a rank.

    Args:
        disks: a folder for each host, in which its ranks run; or one for all ranks.
        notes: folder for the notes of the ranks.
        then: function of `notes` and the rank; or None.
    """
    host = rank // int(os.environ["LOCAL_WORLD_SIZE"])
    socket.gethostname = platform.node = lambda: HOSTS[host]
    os.chdir(disks[host % len(disks)])
    # It counts as the child of a launcher, not of Python.
    multiprocessing.process._parent_process = None
    with open(notes / f"rank{rank}.err", "a") as errors:
        os.dup2(errors.fileno(), 2)  # torch warns there: keep it apart from what a rank prints
    _note_images(notes)
    if then:
        then(notes, rank)


def read_errors(folder):
    """Return what all ranks wrote to their standard error."""
    return "".join(file.read_text() for file in sorted(folder.glob("*.err")))


def read_notes(folder):
    """Return the notes of all ranks, a dict for each."""
    lines = "".join(file.read_text() for file in folder.glob("*.notes")).splitlines()
    return [json.loads(line) for line in lines]


# What a rank does on its host


def spawn_04(notes, rank):
    """Run 04 on this host by its command for two machines. Its processes are forked: faster."""
    import torch.multiprocessing as mp

    url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    without_launcher()
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    sys.argv += ["--nodes=2", f"--node-rank={rank}", "--nproc-per-node=2", f"--dist-url={url}"]


def under_srun(notes, rank):
    """Set the variables of a Slurm step on host1 and host2."""
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    without_launcher()
    step = srun(rank, nodes="host[1-2]", **address)
    os.environ.update({name: str(value) for name, value in step.items()})


def without_launcher():
    for name in list(os.environ):
        if name.startswith(VARIABLES):
            del os.environ[name]


def note_06(notes, rank):
    """Note the checkpoints that a rank writes, and the loader workers that it would start."""
    from imagenet import checkpoint, loader

    def write_file(path, state, original=checkpoint.write_file):
        note(notes, wrote=os.path.basename(path))
        original(path, state)

    def build(*arguments, original=loader.DataLoader, **options):
        note(notes, workers=options["num_workers"])
        none = {"num_workers": 0, "multiprocessing_context": None, "persistent_workers": False}
        return original(*arguments, **options | none)

    checkpoint.write_file = write_file
    loader.DataLoader = build
    os.sched_getaffinity = lambda pid: set(range(CORES))


def import_from(folder, notes, rank):
    """Import from a folder, as Python does with that of the script."""
    sys.path.insert(0, str(folder))


# Below


def note(folder, **what):
    """Write a note of this rank."""
    import torch.distributed as dist

    with open(folder / f"{os.getpid()}.notes", "a") as file:
        file.write(json.dumps({"rank": dist.get_rank()} | what) + "\n")


def _note_images(notes):
    """Note what a rank reads: the indices of each batch, and the size of their data set."""
    from common.memory import MemoryImages
    from imagenet.datasets import Images

    def fetch(self, indices, original=MemoryImages.__getitems__):
        note(notes, dataset=len(self), indices=[int(index) for index in indices])
        return original(self, indices)

    def fetch_06(self, keys, original=Images.__getitems__):
        note(notes, dataset=len(self), indices=[index for _, index in keys])
        return original(self, keys)

    MemoryImages.__getitems__, Images.__getitems__ = fetch, fetch_06
