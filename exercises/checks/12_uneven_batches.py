"""The program must end, with the ranks equal and most images trained."""

from exercises.judging import first_difference, images, refuse, say, steps


def check(ranks):
    if not all(map(steps, ranks)):
        refuse("At least one rank took no training step.", "至少有一个 rank 一步也没有训练。")
    if k := first_difference(ranks):
        refuse(
            f"After training step {k}, the weights of the ranks differ.",
            f"第 {k} 个训练步之后，各 rank 的权重不同。",
        )
    numbers = [number for rank in ranks for number in images(rank)]
    if len(set(numbers)) < 120:
        refuse(
            f"Only {len(set(numbers))} of 150 images were trained: both ranks have at least 60.",
            f"150 张图像只用了 {len(set(numbers))} 张：每个 rank 至少有 60 张。",
        )
    return say(
        f"the ranks took {len(steps(ranks[0]))} and {len(steps(ranks[1]))} training steps, with"
        f" {len(set(numbers))} of 150 images.",
        f"两个 rank 分别训练了 {len(steps(ranks[0]))} 步和 {len(steps(ranks[1]))} 步，"
        f"用了 150 张图像中的 {len(set(numbers))} 张。",
    )
