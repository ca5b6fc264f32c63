"""Checkpoints that survive a kill while one is written, a full disk, a lost machine, a flipped bit.

A checkpoint is one file, which plain torch.load can read too:

    step-00000120.pt    what torch.save writes, then b"sha256:" and the checksum of everything before it, in hex

It is written under another name, flushed to the disk and then renamed, so a file with the right
name is complete. The checksum finds damage that happens later. Reading takes the newest file that
is not damaged. It never runs code: a file holds only tensors, numbers, strings and containers of
those.

Every rank must hold the same state when it calls save(). If all machines see one folder, rank 0
writes. Otherwise one process on every machine writes, so losing a machine loses no checkpoint.
After a restart the newest undamaged file on any machine is used, and sent to all ranks.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import logging
import os
import pickle
import re
import socket
import time

import torch
import torch.distributed as dist

from common.errors import UserError, one_line

MARK = b"sha256:"
TRAILER = len(MARK) + hashlib.sha256().digest_size * 2  # bytes
BEST = "best.pt"

log = logging.getLogger(__name__)


class Damaged(Exception):
    """A file is not a complete checkpoint. The message says what is wrong with it."""


def write_file(path, state):
    """Write a checkpoint. At any moment, `path` is the old file or the complete new one.

    Args:
        state: dict of tensors on the CPU, numbers, strings and containers of those.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w+b") as file:
            try:
                torch.save(state, file)
            # torch raises it while it handles the OSError of a full disk
            except RuntimeError as error:
                raise (
                    error.__context__ if isinstance(error.__context__, OSError) else error
                ) from None
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(2**20):
                digest.update(block)
            file.write(MARK + digest.hexdigest().encode())
            file.flush()
            # before the rename: a power cut could otherwise keep the name without the content
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot do this
        descriptor = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the name itself
        finally:
            os.close(descriptor)


def read_file(path):
    """Return the bytes of a checkpoint without its checksum, which is verified.

    Raises:
        Damaged: they are not what was written, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise Damaged(error.strerror) from None
    body, trailer = data[:-TRAILER], data[-TRAILER:]
    if not data:
        raise Damaged("it is empty")
    if not trailer.startswith(MARK):
        raise Damaged("it has no checksum at its end, so it was cut off or is another kind of file")
    if trailer[len(MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise Damaged("its checksum does not match its content, so the content has changed")
    return body


def decode(body):
    """Return the state in the bytes of a checkpoint, on the CPU.

    Raises:
        Damaged: they hold something else, or code.
    """
    try:
        state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError) as error:
        reason = (
            "it would run code"
            if "Weights only load failed" in str(error)
            else one_line(error)[:200]
        )
        raise Damaged(f"{reason}; expected only tensors, numbers and strings") from None
    if not isinstance(state, dict) or not {"model", "step"} <= state.keys():
        raise Damaged(f"it holds a {type(state).__name__}, expected the state of a run")
    return state


def load_weights(path):
    """Return the weights in a file: a checkpoint of 06 (averaged weights, if it has them) or a plain state_dict.

    Raises:
        UserError: there is no such file, or it is damaged, or it holds something else.
    """
    try:
        with open(path, "rb") as file:
            is_ours = (
                os.path.getsize(path) > TRAILER
                and file.seek(-TRAILER, 2)
                and file.read(len(MARK)) == MARK
            )
        if is_ours:
            state = decode(read_file(path))
            return state["ema"] or state["model"]
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(
            isinstance(w, torch.Tensor) for w in weights.values()
        ):
            raise Damaged(f"it holds a {type(weights).__name__}, not a state_dict")
        return weights
    except (
        OSError,
        RuntimeError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        LookupError,
        Damaged,
    ) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)[:200]
        raise UserError(
            f"--weights {path}: {reason}; expected a checkpoint of this script, or what "
            f"torch.save(model.state_dict(), FILE) writes"
        ) from None


class SaveTimer:
    """Tells when to save.

    Args:
        interval: Interval of --checkpoint-every. Its seconds count from now.
    """

    def __init__(self, interval):
        self.interval = interval
        self.last_save = time.monotonic()

    def planned(self, step):
        """Return whether every rank knows, without a vote, that it saves after this step (from 1)."""
        return not self.interval.is_time and step % self.interval.number == 0

    def overdue(self):
        """Return whether the seconds are over on this rank's clock, and count them again if so."""
        now = time.monotonic()
        if not self.interval.is_time or now - self.last_save < self.interval.number:
            return False
        self.last_save = now
        return True


class Checkpoints:
    """The checkpoints of one run in one folder: the newest few, and the best.

    Every rank makes one, and all ranks call each of its methods at the same time.

    Args:
        folder: str; created if missing; machines may share it or not.
        d: Distributed; reads rank and local_rank.
        group: a gloo process group of all ranks.
        keep: int, how many to keep beside the best.
        patience: seconds a save may wait for the save before it. The other ranks wait too, and they
            have a timeout.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder, d, group, keep, patience):
        self.folder, self.rank, self.group, self.keep, self.patience = (
            folder,
            d.rank,
            group,
            keep,
            patience,
        )
        self.reads = d.local_rank == 0
        self.writes = self._choose_writers(d.local_rank)
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.pending = None  # the save that is being written, as (name, future)

    def save(self, state, name=None, last=False):
        """Copy a state, and write the copy while training continues. Training waits only for the copy.

        A save that fails, or is skipped because the disk is too slow, is reported as a warning.
        Training continues and the checkpoints before it stay.

        Args:
            state: dict with "step", int, and tensors on any device.
            name: BEST, or None for one of the newest.
            last: wait for the save before it, however long that takes, because no other save will
                follow.
        """
        if last:
            self._wait_for_all()
        if not self.writes:
            return
        name = name or f"step-{state['step']:08}.pt"
        ended, failure = self._end_pending()
        if failure:
            log.warning(
                "%s; training continues, and the checkpoints before it are complete", failure
            )
        if not ended:  # never two at a time, which would fill the memory
            log.warning("still saving %s: %s is skipped", self.pending[0], name)
            return
        self.pending = name, self.thread.submit(self._write, name, _to_cpu(state), state["step"])

    def finish(self):
        """Wait on every rank until everything is on the disk: a launcher may kill the writers once a rank has exited.

        Raises:
            UserError: the last save failed.
        """
        failures = self._wait_for_all()
        self.thread.shutdown()
        if failures:
            raise UserError(
                f"{failures[0]}; the checkpoints before it are complete: free some space, then "
                "--resume"
            )

    def load(self):
        """Return the newest undamaged state of any machine, on the CPU, and its path; (None, None) if there is none.

        Raises:
            UserError: there are checkpoints, and all are damaged.
        """
        body, path, step, damage = None, None, -1, []
        if self.reads:
            for path in self._newest_first():
                try:
                    body = read_file(path)
                    step = decode(body)["step"]
                    break
                except Damaged as error:
                    body = None
                    damage.append(
                        f"{path} on {socket.gethostname()} is not a good checkpoint: {error}"
                    )
        results = self._gather((step, path, damage))
        damage = list(dict.fromkeys(line for _, _, lines in results for line in lines))
        # the lowest rank, if several are equal
        winner = max(range(len(results)), key=lambda rank: results[rank][0])
        step, path, _ = results[winner]
        if step < 0 and damage:
            best = self._path(BEST)
            hint = (
                f"; {best} may do: cp {best} {self.folder}/step-00000000.pt"
                if os.path.exists(best)
                else ""
            )
            raise UserError(
                f"{damage[0]}; expected a good one in {self.folder} and found none{hint}; to start "
                "from the "
                f"beginning, name another --checkpoints-path"
            )
        if self.rank == 0:
            for line in damage:
                log.warning("%s; using %s", line, path)
        return (None, None) if step < 0 else (decode(self._broadcast(body, winner)), path)

    def exist(self):
        """Return whether any machine has a checkpoint, damaged or not."""
        return any(self._gather(self.reads and bool(self._newest_first())))

    # Each process by itself

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _newest_first(self):
        names = [name for name in os.listdir(self.folder) if re.fullmatch(r"step-\d{8,}\.pt", name)]
        return [self._path(name) for name in sorted(names, key=_step_of, reverse=True)]

    def _write(self, name, state, step):
        write_file(self._path(name), state)
        # Remove only older files: a newer one may be damaged, and this one the only good one.
        older = [path for path in self._newest_first() if _step_of(path) < step]
        for path in older[self.keep - 1 :] if name != BEST else []:
            with contextlib.suppress(OSError):
                os.remove(path)

    def _end_pending(self):
        """Wait for the save that is being written, if any. Return (whether it has ended, why it failed or None)."""
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
        """Return whether this process writes: rank 0, and the first of each machine that does not see its folder."""
        marker, error = None, None
        if local_rank == 0:
            try:
                os.makedirs(self.folder, exist_ok=True)
                for name in os.listdir(self.folder):
                    if name.endswith(".tmp"):  # left by a killed process
                        with contextlib.suppress(FileNotFoundError):
                            os.remove(self._path(name))
                marker = self._path(f".seen-by-{socket.gethostname()}-{os.getpid()}")
                with open(marker, "x"):
                    pass
            except OSError as failure:
                error = (
                    f"cannot write to --checkpoints-path {self.folder} on {socket.gethostname()}: "
                )
                error += f"{failure.strerror}; name a folder of yours"
        results = self._gather((marker, error))
        first = results[0][0]
        shared = (
            marker is not None
            and first is not None
            and os.path.exists(self._path(os.path.basename(first)))
        )
        self._gather(None)  # wait until every process has looked
        if marker is not None:
            with contextlib.suppress(OSError):
                os.remove(marker)
        if error := next((error for _, error in results if error), None):
            raise UserError(error)
        return self.rank == 0 or (local_rank == 0 and not shared)

    def _wait_for_all(self):
        """Wait until no rank is writing, in turns shorter than the timeout: a slow disk must not look like a lost rank.

        Returns:
            list of str, why saves failed.
        """
        failures, all_ended = [], False
        while not all_ended:
            results = self._gather(self._end_pending())
            failures += [failure for _, failure in results if failure]
            all_ended = all(ended for ended, _ in results)
        return failures

    def _gather(self, item):
        items = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(items, item, group=self.group)
        return items

    def _broadcast(self, body, source):
        """Send the bytes of one rank to all ranks."""
        length = torch.tensor([len(body) if self.rank == source else 0])
        dist.broadcast(length, source, group=self.group)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(buffer, source, group=self.group)
        return buffer.numpy().tobytes()


def _step_of(path):
    return int(re.search(r"step-(\d+)", os.path.basename(path))[1])


def _to_cpu(state):
    """Return a copy on the CPU, which the next training step does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_to_cpu(value) for value in state]
    return state
