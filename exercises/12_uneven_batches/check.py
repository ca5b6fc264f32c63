"""The program must end, with the ranks equal and most images trained."""

from exercises.judge.judging import (
    images,
    refuse,
    refuse_different_weights,
    refuse_unequal_messages,
    same,
    say,
    steps,
    variable,
    weights_of,
)


def check(ranks):
    if not all(map(steps, ranks)):
        refuse("At least one rank took no training step.", "至少有一个 rank 一步也没有训练。")
    refuse_different_weights(ranks)
    counts = [len(steps(rank)) for rank in ranks]
    if not same(*[weights_of(variable(rank, "model")) for rank in ranks]):
        refuse(
            f"The ranks took {counts[0]} and {counts[1]} training steps, and end with different"
            " weights.",
            f"两个 rank 分别训练了 {counts[0]} 步和 {counts[1]} 步，最后的权重不同。",
        )
    refuse_unequal_messages(ranks)
    parts = [set(images(rank)) - {-1} for rank in ranks]  # a mend may add empty images
    if len(both := parts[0] & parts[1]) > 10:  # a DistributedSampler may repeat one
        refuse(
            f"{len(both)} images were trained on both ranks: the images of a rank are its own.",
            f"有 {len(both)} 张图像，两个 rank 都用了：每个 rank 的图像应该只归自己。",
        )
    used = len(parts[0] | parts[1])
    if used < 120:
        refuse(
            f"Only {used} of 150 images were trained: both ranks have at least 60.",
            f"150 张图像只用了 {used} 张：每个 rank 至少有 60 张。",
        )
    return say(
        f"the ranks took {counts[0]} and {counts[1]} training steps, with {used} of 150 images, and"
        " end with equal weights.",
        f"两个 rank 分别训练了 {counts[0]} 步和 {counts[1]} 步，用了 150 张图像中的 {used} 张，"
        "最后的权重相同。",
    )
