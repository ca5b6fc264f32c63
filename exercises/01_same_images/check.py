"""Each rank must train on its own part of the images, all ranks together on all images."""

from exercises.judge.judging import (
    images,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    values,
)
from exercises.sentences import say

SLACK = 1.2  # a program may also look at some images, to print their size or their number


def check(ranks):
    refuse_repeated_images(ranks, 256)
    refuse_other_training(ranks)
    a, b = (len(images(rank)) for rank in ranks)
    for rank in ranks:
        read = len(set(values(rank, "read")))
        trained = len(images(rank))
        if read > SLACK * trained:
            refuse(
                "Rank {rank} trained on {trained} images, but read {read} from the data set: each"
                " image should be read by one rank only.",
                rank=rank.rank,
                trained=trained,
                read=read,
            )
    return say("rank 0 trained on {a} images, rank 1 on the other {b}.", a=a, b=b)
