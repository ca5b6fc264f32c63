"""Each epoch must have an order of its own, which is common to the ranks."""

from exercises.judge.judging import epochs, images, listed, refuse, refuse_other_training, say

IMAGES = 256
EPOCHS = 3


def check(ranks):
    of_ranks = [epochs(rank, EPOCHS) for rank in ranks]
    if None in of_ranks:
        counts = listed(len(images(rank)) for rank in ranks)
        refuse(
            f"I expected {EPOCHS} epochs of equal size on each rank, and see {counts} images.",
            f"每个 rank 应该有 {EPOCHS} 个大小相同的 epoch，实际训练了 {counts} 张图像。",
        )
    for k, parts in enumerate(zip(*of_ranks, strict=True)):
        if all(len(set(part)) == IMAGES for part in parts):
            refuse(
                f"In epoch {k}, each rank reads all images: the ranks should share them.",
                f"在 epoch {k} 中，每个 rank 都读取了全部图像：各 rank 应该分工。",
            )
        numbers = [number for part in parts for number in part]
        twice = len(numbers) - len(set(numbers))
        missing = IMAGES - len(set(numbers))
        if twice or missing:
            refuse(
                f"In epoch {k}, {missing} images were read by no rank, and {twice} more than once:"
                " the ranks do not shuffle alike.",
                f"在 epoch {k} 中，有 {missing} 张图像没有 rank 读取，{twice} 张读取了不止一次："
                "各 rank 打乱的顺序不一致。",
            )
    for a in range(EPOCHS):
        for b in range(a):
            first, second = of_ranks[0][b], of_ranks[0][a]
            if first == second:
                refuse(
                    f"Epochs {b} and {a} have the same images in the same order on rank 0,"
                    f" beginning with {first[:3]}.",
                    f"rank 0 在 epoch {b} 和 epoch {a} 中读取的图像相同，顺序也相同，"
                    f"开头都是 {first[:3]}。",
                )
            if sorted(first) == sorted(second):
                refuse(
                    f"Epochs {b} and {a} have other orders, but rank 0 reads the same half of the"
                    " images in both.",
                    f"epoch {b} 和 epoch {a} 的顺序不同，但 rank 0 读取的是同一半图像。",
                )
    refuse_other_training(ranks)
    return say(
        "each epoch has an order of its own, and both ranks use it.",
        "每个 epoch 的顺序各不相同，两个 rank 从同一个打乱后的顺序中各取一半。",
    )
