"""Checkpoints of a run: which process writes them, which are kept, which one is read.

Every rank must hold the same state when it calls save(). If all machines see one folder, rank 0
writes. Otherwise one process on every machine writes, so losing a machine loses no checkpoint.
After a restart the newest undamaged file on any machine is used, and sent to all ranks. The files:
see checkpoint_file.py.
"""

import concurrent.futures
import contextlib
import logging
import os
import re
import socket
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.errors import UserError
from imagenet.checkpoint_file import Damaged, decode, read_file, write_file

BEST = "best.pt"

log = logging.getLogger(__name__)


class SaveTimer:
    """Tells when to save.

    Args:
        interval: Interval of --checkpoint-every. Its seconds count from now.
    """

    def __init__(self, interval):
        self.interval = interval
        self.last_save = time.monotonic()

    def planned(self, step):
        """Return whether every rank saves after this step (from 1).

        They all know, without a vote.
        """
        return not self.interval.is_time and step % self.interval.number == 0

    def overdue(self):
        """Return whether the seconds are over on this rank's clock. If so, count them again."""
        now = time.monotonic()
        if not self.interval.is_time or now - self.last_save < self.interval.number:
            return False
        self.last_save = now
        return True


class Found(NamedTuple):
    """What a process has found in its folder."""

    step: int  # of the newest undamaged checkpoint; -1: there is none
    path: str | None  # of that checkpoint
    damage: list  # of str, one for each damaged checkpoint


class Checkpoints:
    """The checkpoints of one run in one folder: the newest few, and the best.

    Every rank makes one, and all ranks call each of its methods at the same time.

    Args:
        folder: str; created if missing; machines may share it or not. None: nothing is kept.
        d: Distributed; reads rank and local_rank.
        group: a gloo process group of all ranks.
        keep: int, how many to keep beside the best.
        patience: seconds a save may wait for the save before it. The other ranks wait too, and they
            have a timeout.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder, d, group, keep, patience):
        self.folder = folder
        self.rank = d.rank
        self.group = group
        self.keep = keep
        self.patience = patience
        self.reads = folder is not None and d.local_rank == 0
        self.writes = folder is not None and self._choose_writers(d.local_rank)
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.pending = None  # the save that is being written, as (name, future)

    def save(self, state, name=None, wait=False):
        """Copy a state, and write the copy while training continues.

        A save that fails, or is skipped because the disk is too slow, is reported as a warning.
        Training continues and the checkpoints before it stay.

        Args:
            state: dict with "step", int, and tensors on any device.
            name: BEST, or None for one of the newest.
            wait: wait for the save before it, however long that takes, so that this one is not
                skipped.
        """
        failures = self._wait_for_all() if wait else []
        if not self.writes:
            return
        name = name or f"step-{state['step']:08}.pt"
        ended, failure = self._end_pending()
        if failure or (failures and self.rank == 0):
            log.warning(
                "%s; training continues, and the checkpoints before it are complete",
                failure or failures[0],
            )
        if not ended:  # never two at a time, which would fill the memory
            log.warning("still saving %s: %s is skipped", self.pending[0], name)
            return
        future = self.thread.submit(self._write, name, copy_to_cpu(state), state["step"])
        self.pending = name, future

    def finish(self):
        """Wait on every rank until everything is on the disk.

        A launcher may kill the writers once a rank has exited.

        Raises:
            UserError: the last save failed.
        """
        failures = self._wait_for_all()
        self.thread.shutdown()
        if failures:
            raise UserError(
                f"{failures[0]}; the checkpoints before it are complete: "
                "free some space, then --resume"
            )

    def load(self, group=None):
        """Return the newest undamaged state of any machine, on the CPU, and its path.

        Args:
            group: a gloo process group of all ranks, whose timeout is long enough to read and send
                a large file. None: the group of the others.

        Returns:
            (state, path), or (None, None) if there is no checkpoint.

        Raises:
            UserError: there are checkpoints, and all are damaged.
        """
        body, found = self._find_newest() if self.reads else (None, Found(-1, None, []))
        group = group or self.group
        everyone = gather(found, group)
        # the lowest rank, if several have the same step
        source = max(range(len(everyone)), key=lambda rank: everyone[rank].step)
        newest = everyone[source]
        damage = list(dict.fromkeys(line for found in everyone for line in found.damage))
        if newest.step < 0 and damage:
            best = self._path(BEST)
            hint = ""
            if os.path.exists(best):
                hint = f"; {best} may do: cp {best} {self._path('step-00000000.pt')}"
            raise UserError(
                f"{damage[0]}; expected a good one in {self.folder} and found none{hint}; "
                "to start from the beginning, name another --checkpoints-path"
            )
        if newest.step < 0:
            return None, None
        if self.rank == 0:
            for line in damage:
                log.warning("%s; using %s", line, newest.path)
        return decode(broadcast(body, source, group)), newest.path

    def exist(self):
        """Return whether any machine has a checkpoint, damaged or not, or the best."""
        any_here = self.reads and (self._newest_first() or os.path.exists(self._path(BEST)))
        return any(gather(bool(any_here), self.group))

    # Each process by itself

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _newest_first(self):
        names = [name for name in os.listdir(self.folder) if re.fullmatch(r"step-\d{8,}\.pt", name)]
        return [self._path(name) for name in sorted(names, key=step_of, reverse=True)]

    def _find_newest(self):
        """Return the bytes of the newest undamaged checkpoint, or None, and what was Found."""
        damage = []
        for path in self._newest_first():
            try:
                body = read_file(path)
                return body, Found(decode(body)["step"], path, damage)
            except Damaged as error:
                host = socket.gethostname()
                damage.append(f"{path} on {host} is not a good checkpoint: {error}")
        return None, Found(-1, None, damage)

    def _write(self, name, state, step):
        self._remove_leftovers()
        write_file(self._path(name), state)
        if name == BEST:
            return
        # Remove only older files: a newer one may be damaged, and this one the only good one.
        older = [path for path in self._newest_first() if step_of(path) < step]
        for path in older[self.keep - 1 :]:
            with contextlib.suppress(OSError):
                os.remove(path)

    def _remove_leftovers(self):
        """Remove what killed processes have left: hidden files that nobody writes any more."""
        for name in os.listdir(self.folder):
            if re.match(r"\.(seen-by-|(step-\d+|best)\.pt\..*\.tmp$)", name):
                with contextlib.suppress(OSError):
                    path = self._path(name)
                    if time.time() - os.path.getmtime(path) > 3600:
                        os.remove(path)

    def _end_pending(self):
        """Wait for the save that is being written, if any.

        Returns:
            (ended, failure): whether it has ended, and why it failed, or None.
        """
        if self.pending is None:
            return True, None
        name, future = self.pending
        if not concurrent.futures.wait([future], self.patience).done:
            return False, None
        self.pending = None
        try:
            future.result()
        except OSError as error:
            return True, f"cannot save {self._path(name)}: {error.strerror}"
        return True, None

    # All processes together

    def _choose_writers(self, local_rank):
        """Return whether this process writes.

        Rank 0 writes, and so does the first process of each machine that does not see its folder.
        """
        marker, problem = self._prepare_folder() if local_rank == 0 else (None, None)
        results = gather((marker, problem), self.group)
        marker_of_rank_0 = results[0][0]
        sees_it = marker_of_rank_0 is not None and os.path.exists(self._path(marker_of_rank_0))
        gather(None, self.group)  # wait until every process has looked
        if marker is not None:
            with contextlib.suppress(OSError):
                os.remove(self._path(marker))
        problems = [problem for _, problem in results if problem]
        if problems:
            raise UserError(problems[0])
        return self.rank == 0 or (local_rank == 0 and not sees_it)

    def _prepare_folder(self):
        """Make the folder, and in it a file that other machines see if they share it.

        Returns:
            (marker, problem): the name of the file, or None, and why it could not be made, or None.
        """
        host = socket.gethostname()
        try:
            os.makedirs(self.folder, exist_ok=True)
            # Another name each time: in containers, a killed process had this host and this pid.
            descriptor, marker = tempfile.mkstemp(prefix=f".seen-by-{host}-", dir=self.folder)
            os.close(descriptor)
        except OSError as error:
            return None, (
                f"cannot write to --checkpoints-path {self.folder} on {host}: {error.strerror}; "
                "name a folder of yours"
            )
        return os.path.basename(marker), None

    def _wait_for_all(self):
        """Wait until no rank is writing.

        It waits in turns shorter than the timeout: a slow disk must not look like a lost rank.

        Returns:
            list of str, why saves failed.
        """
        failures = []
        all_ended = False
        while not all_ended:
            ended, failure = self._end_pending()
            if not ended:
                log.warning("still saving %s: waiting for it", self.pending[0])
            results = gather((ended, failure), self.group)
            failures += [failure for _, failure in results if failure]
            all_ended = all(ended for ended, _ in results)
        return failures


def gather(item, group):
    """Return what each rank of a group gives, as a list."""
    items = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items


def broadcast(body, source, group):
    """Send the bytes of one rank to all ranks."""
    is_source = dist.get_rank() == source
    length = torch.tensor([len(body) if is_source else 0])
    dist.broadcast(length, source, group=group)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if is_source:
        buffer = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()


def step_of(path):
    return int(re.search(r"step-(\d+)", os.path.basename(path))[1])


def copy_to_cpu(state):
    """Return a copy on the CPU, which the next training step does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copy_to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [copy_to_cpu(value) for value in state]
    return state
