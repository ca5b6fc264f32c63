"""Checkpoints that outlive whatever ends a run: a kill in mid-write, a full disk, a lost machine, a flipped bit.

A save is one file, which plain torch.load can read too:

    step-00000120.pt    what torch.save writes, then b"sha256:" and the checksum of all that stands before, in hex

It is written under another name, flushed to the disk and only then renamed, so a file that has the right name is
whole; the checksum finds what the disk does to it later. Reading goes from the newest to the oldest and takes the
first that is good. It never runs code: a file may hold tensors, numbers, strings and containers of those, no more.

Every rank must hold the same state when it calls save(). One process writes it for each folder: rank 0 alone if
all machines see one folder, and else one on every machine, so that a machine that is lost takes nothing with it.
On a restart the newest good file of any machine wins, and is sent to all ranks.
"""

import argparse
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
    """A file is no whole checkpoint; the message says what is wrong with it."""


def write_file(path, state):
    """Write a checkpoint, so that at any moment `path` is what it was before or all of the new one.

    Args:
        state: dict of tensors on the CPU, numbers, strings and containers of those.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            hashing = _HashingFile(file)
            _save(state, hashing)
            file.write(MARK + hashing.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())  # on the disk before the name is: else a power cut may leave the name alone
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the name itself
        finally:
            os.close(descriptor)


def _save(state, file):
    try:
        torch.save(state, file)
    except RuntimeError:  # what torch's writer makes of an OSError that `file` has raised
        if file.error is None:
            raise
        raise file.error from None


class _HashingFile:
    """A file that computes the checksum of what is written to it."""

    def __init__(self, file):
        self.file, self.digest, self.error = file, hashlib.sha256(), None

    def write(self, data):
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def read_file(path):
    """The bytes of a checkpoint, without their checksum, which has been compared.

    Raises:
        Damaged: they are not what was written, or cannot be read at all.
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
        raise Damaged("it has no checksum at its end, so it has been cut off or is something else")
    if trailer[len(MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise Damaged("its checksum is not that of its content, so some of it has changed")
    return body


def decode(body):
    """The state in the bytes of a checkpoint, on the CPU.

    Raises:
        Damaged: they hold something else, or more than data.
    """
    try:
        state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError) as error:
        reason = "it would run code" if "Weights only load failed" in str(error) else one_line(error)[:200]
        raise Damaged(f"{reason}; expected tensors, numbers and strings alone") from None
    if not isinstance(state, dict) or not {"model", "step"} <= state.keys():
        raise Damaged(f"it holds a {type(state).__name__}, expected the state of a run")
    return state


def load_weights(path):
    """The weights in a file: those of one of our checkpoints, averaged ones if it has them, or a plain state_dict.

    Raises:
        UserError: there is no such file, or it is damaged, or it holds something else.
    """
    try:
        with open(path, "rb") as file:
            ours = os.path.getsize(path) > TRAILER and file.seek(-TRAILER, 2) and file.read(len(MARK)) == MARK
        if ours:
            state = decode(read_file(path))
            return state["ema"] or state["model"]
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(isinstance(w, torch.Tensor) for w in weights.values()):
            raise Damaged(f"it holds no state_dict but a {type(weights).__name__}")
        return weights
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, Damaged) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)[:200]
        raise UserError(
            f"--weights {path}: {reason}; expected a checkpoint of this script, or what "
            f"torch.save(net.state_dict(), FILE) writes"
        ) from None


class Every:
    """How often to save, from a flag: steps, as in 100, or seconds, as in 600s."""

    def __init__(self, text):
        match = re.fullmatch(r"([1-9][0-9]{0,8})(s?)", text)
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r} given, expected steps, as 100, or seconds, as 600s")
        self.text, self.number, self.by_time = text, int(match[1]), bool(match[2])
        self.last = time.monotonic()

    def __str__(self):
        return self.text

    def due(self, step):
        """Whether to save after this step, counted from 1."""
        if not self.by_time:
            return step % self.number == 0
        if time.monotonic() - self.last < self.number:
            return False
        self.last = time.monotonic()
        return True


class Checkpoints:
    """The checkpoints of one run in one folder: the newest few, and the best.

    Every rank makes one, and calls each of its methods at the same time.

    Args:
        folder: str; it need not be there, and machines may share it or not.
        rank, local_rank: int.
        group: a gloo process group of all ranks.
        keep: int, how many to keep beside the best.
        patience: seconds that a save may wait for the one before; the other ranks wait too, and have a timeout.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder, rank, local_rank, group, keep=3, patience=30):
        self.folder, self.rank, self.group, self.keep, self.patience = folder, rank, group, keep, patience
        self.reads = local_rank == 0
        self.writes = self._choose_writers(local_rank)
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.pending = None  # the save that is being written, as (name, future)

    def save(self, state, name=None, last=False):
        """Copy a state and write it while training goes on; the copy is all that training waits for.

        A save that fails, or is left out because the disk is too slow, is named in a warning; those before it stay,
        and training goes on.

        Args:
            state: dict with "step", int, and tensors on any device.
            name: BEST, or None for one of the newest.
            last: wait for the one before, however long that takes, as no other will follow.
        """
        if last:
            self._settle()
        if not self.writes:
            return
        name = name or f"step-{state['step']:08}.pt"
        ended, failure = self._end_pending()
        if failure:
            log.warning("%s; training goes on, and the checkpoints before it are whole", failure)
        if not ended:  # never two at a time, which would fill the memory
            log.warning("still saving %s: %s is left out", self.pending[0], name)
            return
        self.pending = name, self.thread.submit(self._write, name, _to_cpu(state), state["step"])

    def finish(self):
        """Wait until all is on the disk, on every rank: a launcher may end those that write when another has left.

        Raises:
            UserError: the last save failed.
        """
        failures = self._settle()
        self.thread.shutdown()
        if failures:
            raise UserError(f"{failures[0]}; the checkpoints before it are whole: make room, then --resume")

    def load(self):
        """The newest good state on any machine, on the CPU, or None if there is no checkpoint at all.

        Returns:
            (state, where it lay), or None.

        Raises:
            UserError: there are some, and all are damaged.
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
                    damage.append(f"{path} on {socket.gethostname()} is no good checkpoint: {error}")
        found = self._gather((step, path, damage))
        damage = list(dict.fromkeys(line for _, _, lines in found for line in lines))
        winner = max(range(len(found)), key=lambda rank: found[rank][0])  # the lowest rank, of several equal ones
        step, path, _ = found[winner]
        if step < 0 and damage:
            best = self._path(BEST)
            hint = f"; {best} may do: cp {best} {self.folder}/step-00000000.pt" if os.path.exists(best) else ""
            raise UserError(
                f"{damage[0]}; expected a good one in {self.folder} and found none{hint}; to begin "
                f"anew, name another --checkpoints-path"
            )
        if self.rank == 0:
            for line in damage:
                log.warning("%s; using %s", line, path)
        return None if step < 0 else (decode(self._broadcast(body, winner)), path)

    def exist(self):
        """Whether any machine has one, good or not."""
        return any(self._gather(self.reads and bool(self._newest_first())))

    # Of one process

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _newest_first(self):
        names = [name for name in os.listdir(self.folder) if re.fullmatch(r"step-\d{8,}\.pt", name)]
        return [self._path(name) for name in sorted(names, key=_step_of, reverse=True)]

    def _write(self, name, state, step):
        write_file(self._path(name), state)
        # Only what is older than this one goes: a newer one may be damaged, and this one all there is.
        older = [path for path in self._newest_first() if _step_of(path) < step]
        for path in older[self.keep - 1 :] if name != BEST else []:
            with contextlib.suppress(OSError):
                os.remove(path)

    def _end_pending(self):
        """Wait for the save that is being written, if any: (whether it has ended, why it failed or None)."""
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

    # Of all processes together

    def _choose_writers(self, local_rank):
        """Whether this process is to write: rank 0, and the first of each machine that does not see its folder."""
        mark, error = None, None
        if local_rank == 0:
            try:
                os.makedirs(self.folder, exist_ok=True)
                for name in os.listdir(self.folder):
                    if name.endswith(".tmp"):  # what a killed process has left
                        with contextlib.suppress(FileNotFoundError):
                            os.remove(self._path(name))
                mark = self._path(f".seen-by-{socket.gethostname()}-{os.getpid()}")
                with open(mark, "x"):
                    pass
            except OSError as failure:
                error = f"cannot write to --checkpoints-path {self.folder} on {socket.gethostname()}: "
                error += f"{failure.strerror}; name a folder of yours"
        found = self._gather((mark, error))
        first = found[0][0]
        shared = mark is not None and first is not None and os.path.exists(self._path(os.path.basename(first)))
        self._gather(None)  # all have looked
        if mark is not None:
            with contextlib.suppress(OSError):
                os.remove(mark)
        if error := next((error for _, error in found if error), None):
            raise UserError(error)
        return self.rank == 0 or (local_rank == 0 and not shared)

    def _settle(self):
        """Wait until nothing is being written, on any rank; returns why some failed. A slow disk is no lost rank."""
        failures, all_ended = [], False
        while not all_ended:
            told = self._gather(self._end_pending())
            failures += [failure for _, failure in told if failure]
            all_ended = all(ended for ended, _ in told)
        return failures

    def _gather(self, item):
        items = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(items, item, group=self.group)
        return items

    def _broadcast(self, body, source):
        """The bytes that one rank has, on all ranks."""
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
    """A copy on the CPU, which the next training step does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_to_cpu(value) for value in state]
    return state
