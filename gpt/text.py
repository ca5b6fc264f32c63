"""The text of 08: its bytes are the tokens, in windows of which each is read once per epoch."""

import itertools
from pathlib import Path

import torch
from torch.utils.data import Dataset, DistributedSampler

from common.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 256
IGNORED = -100  # a target without a byte to predict; nn.CrossEntropyLoss leaves it out


def build_windows(args):
    """Read --text, or this book, and cut it into windows.

    Returns:
        (train_set, test_set), Windows of the first nine tenths of each file, and of the last.

    Raises:
        UserError: a file is missing, or has not enough text to train and to evaluate.
    """
    book = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    train, test = b"", b""
    for path in [Path(args.text)] if args.text else book:
        text = read(path)
        cut = len(text) * 9 // 10
        train += text[:cut]
        test += text[cut:]
    if len(test) < 2:
        raise UserError(
            f"--text {args.text}: {len(train + test)} bytes: expected 20 or more; "
            "name a file with text, or leave out --text to train on this book"
        )
    return tuple(Windows(text, args.context, args.batch_size) for text in (train, test))


def read(path):
    """Return the bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--text {path}: {error.strerror}: expected a file with text; "
            "name one, or leave out --text to train on this book"
        ) from None


class Windows(Dataset):
    """A text as windows that follow each other: each byte but the first is a target once.

    At the end are windows, and a part of one, without targets: so the ranks have equal numbers of
    windows, and none is read twice.

    Args:
        text: bytes.
        context: int, tokens per window.
        multiple: int, which divides the number of windows.
    """

    in_memory = True

    def __init__(self, text, context, multiple):
        self.count = len(text) - 1  # of targets
        stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        length = -(-self.count // (context * multiple)) * context * multiple  # rounded up
        tokens = torch.zeros(length, dtype=torch.int64)
        targets = torch.full((length,), IGNORED)
        tokens[: self.count] = stream[:-1]
        targets[: self.count] = stream[1:]
        self.tokens = tokens.view(-1, context)
        self.targets = targets.view(-1, context)

    def __len__(self):
        return len(self.tokens)

    def __getitems__(self, indices):
        """Return a whole batch. The DataLoader calls this instead of __getitem__."""
        return self.tokens[indices], self.targets[indices]


class WindowSampler(DistributedSampler):
    """A DistributedSampler that can continue in the middle of an epoch."""

    first = 0  # which of this rank's windows comes first

    def set_epoch(self, epoch, first=0):
        super().set_epoch(epoch)
        self.first = first

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.first, None)
