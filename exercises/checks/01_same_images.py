"""Each rank must train on its own part of the images, all ranks together on all images."""

from exercises.judging import (
    images,
    listed,
    refuse,
    refuse_other_training,
    refuse_unknown_images,
    say,
)


def check(ranks):
    refuse_repeated_images(ranks, 256)
    refuse_other_training(ranks)
    a, b = (len(images(rank)) for rank in ranks)
    return say(
        f"rank 0 trained on {a} images, rank 1 on the other {b}.",
        f"rank 0 用 {a} 张图像训练，rank 1 用另外 {b} 张。",
    )


def refuse_repeated_images(ranks, count):
    """Refuse ranks that do not read each of `count` images once in all."""
    parts = [set(images(rank)) for rank in ranks]
    numbers = sorted(number for rank in ranks for number in images(rank))
    refuse_unknown_images(numbers)
    if all(len(part) == count for part in parts):
        refuse(
            f"Each rank trained on all {count} images, so each image was trained on every rank.",
            f"每个 rank 都用全部 {count} 张图像训练，所以每张图像在每个 rank 上都训练了一次。",
        )
    if parts[0] == parts[1]:
        share = len(parts[0]) / count
        refuse(
            f"Both ranks trained on the same images, {listed(parts[0])}: together they saw"
            f" {share:.0%} of the training set.",
            f"两个 rank 用的图像相同（{listed(parts[0])}）：合起来只用了训练集的 {share:.0%}。",
        )
    if both := parts[0] & parts[1]:
        refuse(
            f"{len(both)} images were trained on both ranks, for example image {min(both)}.",
            f"有 {len(both)} 张图像，两个 rank 都用了，例如图像 {min(both)}。",
        )
    if missing := set(range(count)) - set(numbers):
        refuse(
            f"{len(missing)} of {count} images were never trained, for example image"
            f" {min(missing)}.",
            f"{count} 张图像中，有 {len(missing)} 张从未用到，例如图像 {min(missing)}。",
        )
    if len(numbers) > count:
        refuse(
            f"{len(numbers) - count} images were trained more than once.",
            f"有 {len(numbers) - count} 张图像用了不止一次。",
        )
