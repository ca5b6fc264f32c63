"""Checkpoint files that survive a kill while one is written, a full disk, a flipped bit.

A checkpoint is one file, which plain torch.load can read too: what torch.save writes, then
b"sha256:" and the checksum of everything before it, in hex.

It is written under another name, flushed to the disk and then renamed, so a file with the right
name is complete. The checksum finds damage that happens later. Reading never runs code: a file
holds only tensors, numbers, strings and containers of those.
"""

import contextlib
import hashlib
import io
import os
import pickle
import socket

import torch

from common.errors import one_line

MARK = b"sha256:"
TRAILER = len(MARK) + hashlib.sha256().digest_size * 2  # bytes
# What torch.load raises for a file that it cannot read.
UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError)


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
            except RuntimeError as error:
                # On a full disk, torch raises it while it handles an OSError.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(2**20):
                digest.update(block)
            file.write(MARK + digest.hexdigest().encode())
            # Before the rename: a power cut could otherwise keep the name without the content.
            file.flush()
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
    body = data[:-TRAILER]
    trailer = data[-TRAILER:]
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
    except UNREADABLE as error:
        reason = one_line(error)[:200]
        if "Weights only load failed" in str(error):
            reason = "it would run code"
        raise Damaged(f"{reason}; expected only tensors, numbers and strings") from None
    if not isinstance(state, dict) or not {"model", "step"} <= state.keys():
        raise Damaged(f"it holds a {type(state).__name__}, expected the state of a run")
    return state


def has_checksum(path):
    """Return whether a file ends as write_file() ends it.

    Raises:
        OSError: it cannot be read.
    """
    if os.path.getsize(path) <= TRAILER:
        return False
    with open(path, "rb") as file:
        file.seek(-TRAILER, os.SEEK_END)
        return file.read(len(MARK)) == MARK
