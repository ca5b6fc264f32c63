"""Each rank must train on its own part of the images, all ranks together on all images."""

from exercises.judge.judging import (
    images,
    refuse,
    refuse_other_training,
    refuse_repeated_images,
    say,
    values,
)


def check(ranks):
    refuse_repeated_images(ranks, 256)
    refuse_other_training(ranks)
    a, b = (len(images(rank)) for rank in ranks)
    for rank in ranks:
        read = len(values(rank, "read"))
        trained = len(images(rank))
        if read > trained:
            refuse(
                f"Rank {rank.rank} trained on {trained} images, but read {read} from the data set:"
                " each image should be read by one rank only.",
                f"rank {rank.rank} 用 {trained} 张图像训练，却从数据集读取了 {read} 张："
                "每张图像应该只由一个 rank 读取。",
            )
    return say(
        f"rank 0 trained on {a} images, rank 1 on the other {b}.",
        f"rank 0 用 {a} 张图像训练，rank 1 用另外 {b} 张。",
    )
