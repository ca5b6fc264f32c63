"""Two workers per rank must divide the stream, so that each image is trained once."""

from collections import Counter

from exercises.judge.judging import (
    images,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    values,
)
from exercises.judge.runner import THREE_RANKS, Setup
from exercises.sentences import say

SETUPS = [Setup(), THREE_RANKS]
IMAGES = 240
WORKERS = 2
SLACK = 1.2  # a program may also look at some images


def check_run(ranks):
    for rank in ranks:
        workers = max(values(rank, "loader"), default=0)
        if workers < WORKERS:
            refuse(
                "The loader of rank {rank} has {workers} workers: keep num_workers={expected}, for"
                " one that reads alone may be too slow.",
                rank=rank.rank,
                workers=workers,
                expected=WORKERS,
            )
        times = Counter(images(rank))
        if len(times) < IMAGES and set(times.values()) == {workers}:
            refuse(
                "Rank {rank} trained on each of its {count} images {times} times: each of its"
                " {times} workers reads all of them.",
                rank=rank.rank,
                count=len(times),
                times=workers,
            )
        if sum(values(rank, "loaded")) > SLACK * len(images(rank)):
            refuse(
                "Rank {rank} trained on {trained} images, but its workers read {read}.",
                rank=rank.rank,
                trained=len(images(rank)),
                read=sum(values(rank, "loaded")),
            )
    refuse_repeated_images(ranks, IMAGES)
    refuse_other_training(ranks)
    return say(
        "the workers of all ranks divide the stream: each of {images} images is trained once.",
        images=IMAGES,
    )
