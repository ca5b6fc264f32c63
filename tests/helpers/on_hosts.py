"""Let forked ranks run on the hosts of tools/lab/hosts.py, and note what each of them does.

A rank of helpers/ranks.py enters the network, the name and the disk of its host before it runs the
script. So a start on two hosts takes a second or two, not the seconds in which four processes
import torch.
"""

import ctypes
import functools
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys

from launchers import VARIABLES, srun

# In <sched.h>: CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWNET
NEW_MOUNTS = 0x00020000
NEW_NAME = 0x04000000
NETWORK = 0x40000000
CORES = 8  # of each host, as 06 sees it


def enter(hosts, disk, notes, then=None):
    """Return the first act of a rank, a function of the rank: it enters its host.

    Args:
        disk: folder where each host sees a folder of its own, disk_of(disk, name); or None.
        notes: folder for the notes of the ranks, which both hosts see.
        then: function of `notes` and the rank, called on the host; or None.
    """
    addresses = f"{hosts.folder.name}/hosts"
    return functools.partial(_enter, hosts.names, hosts.namespaces, addresses, disk, notes, then)


def _enter(names, namespaces, addresses, disk, notes, then, rank):
    host = rank // int(os.environ["LOCAL_WORLD_SIZE"])
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespaces[host]}") as network:
        _succeeds(libc.setns(network.fileno(), NETWORK))
    _succeeds(libc.unshare(NEW_MOUNTS | NEW_NAME))
    socket.sethostname(names[host])
    platform._uname_cache = None  # or platform.node() is the name from before the fork
    _mount("--make-rprivate", "/")
    _mount("--bind", addresses, "/etc/hosts")
    if disk:
        _mount("--bind", disk_of(disk, names[host]), disk)
    alone(notes, then, rank)


def disk_of(disk, host):
    """Return the folder that a host sees as `disk`."""
    return disk.with_name(f"{disk.name}-of-{host}")


def alone(notes, then, rank):
    """Prepare a rank: it counts as the child of a launcher, not of Python, and takes notes."""
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


def spawn_04(url, notes, rank):
    """Run 04 on this host by its command for two machines. Its processes are forked: faster."""
    import torch.multiprocessing as mp

    without_launcher()
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    sys.argv += ["--nodes=2", f"--node-rank={rank}", "--nproc-per-node=2", f"--dist-url={url}"]


def under_srun(notes, rank):
    """Set the variables of a Slurm step on host1 and host2."""
    without_launcher()
    os.environ.update({name: str(value) for name, value in srun(rank, nodes="host[1-2]").items()})


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


def _succeeds(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)
