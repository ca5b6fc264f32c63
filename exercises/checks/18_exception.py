"""After a damaged image, all ranks must end, or all must train on, with equal weights."""

from exercises.judging import first_difference, refuse, say, steps

MAY_FAIL = True
BATCHES = 4  # of each rank


def check(ranks):
    if any(rank.exit_code != 0 for rank in ranks):
        return check_error(ranks)
    counts = [len(steps(rank)) for rank in ranks]
    if counts[0] != counts[1]:
        refuse(
            f"Rank 0 took {counts[0]} training steps, rank 1 took {counts[1]}.",
            f"rank 0 训练了 {counts[0]} 步，rank 1 训练了 {counts[1]} 步。",
        )
    if k := first_difference(ranks):
        refuse(
            f"After training step {k}, the weights of the ranks differ.",
            f"第 {k} 个训练步之后，各 rank 的权重不同。",
        )
    if any(weight.isnan().any() for weight in steps(ranks[0])[-1].weights):
        refuse(
            "The weights are not numbers (NaN): the damaged image was trained.",
            "权重变成了 NaN：损坏的图像参与了训练。",
        )
    if counts[0] < BATCHES - 1:
        refuse(
            f"The ranks took {counts[0]} training steps; one damaged image costs at most one of"
            f" {BATCHES}.",
            f"各 rank 只训练了 {counts[0]} 步；因一张损坏的图像，最多跳过 {BATCHES} 步中的一步。",
        )
    return say(
        f"both ranks took the same {counts[0]} training steps, and their weights are equal.",
        f"两个 rank 都训练了 {counts[0]} 步，权重相同。",
    )


def check_error(ranks):
    damaged = [rank for rank in ranks if rank.error and "damaged" in rank.error[1]]
    if not damaged:
        refuse(
            "The program failed, but no rank said that an image is damaged.",
            "程序失败了，但没有 rank 报告有图像损坏。",
        )
    if any(rank.exit_code == 0 for rank in ranks):
        refuse(
            "One rank failed, and the other one ended as if all was well.",
            "一个 rank 失败，另一个却像没事一样正常结束。",
        )
    rank = damaged[0].rank
    return say(
        f"rank {rank} says that an image is damaged, and no rank waits for it.",
        f"rank {rank} 报告有图像损坏，没有 rank 在等它。",
    )
