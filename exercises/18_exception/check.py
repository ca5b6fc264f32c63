"""After a damaged image, all ranks must end, or all must train on, with equal weights."""

from exercises.judge.judging import (
    describe_error,
    lost_another,
    refuse,
    refuse_different_weights,
    refuse_unequal_messages,
    same,
    say,
    steps,
    variable,
    weights_of,
)

MAY_FAIL = True
BATCHES = 4  # of each rank
WORDS = ("damage", "corrupt", "nan", "invalid", "bad", "image")  # in errors that say why


def check(ranks):
    if any(rank.exit_code != 0 for rank in ranks):
        return check_error(ranks)
    counts = [len(steps(rank)) for rank in ranks]
    weights = [weights_of(variable(rank, "model")) for rank in ranks]
    if any(weight.isnan().any() for of_rank in weights for weight in of_rank):
        refuse(
            "The weights are not numbers (NaN): the damaged image was trained.",
            "权重变成了 NaN：损坏的图像参与了训练。",
        )
    refuse_different_weights(ranks)
    if not same(*weights):
        refuse(
            f"The ranks took {counts[0]} and {counts[1]} training steps, and end with different"
            " weights.",
            f"两个 rank 分别训练了 {counts[0]} 步和 {counts[1]} 步，最后的权重不同。",
        )
    refuse_unequal_messages(ranks)
    if min(counts) < BATCHES - 1:
        refuse(
            f"The ranks ended without an error after training step {min(counts)}; one damaged image"
            f" costs at most one of {BATCHES} steps.",
            f"各 rank 只训练了 {min(counts)} 步，结束时没有报错；"
            f"因一张损坏的图像，最多跳过 {BATCHES} 步中的一步。",
        )
    return say(
        f"the ranks took {counts[0]} and {counts[1]} training steps, and their weights are equal.",
        f"两个 rank 分别训练了 {counts[0]} 步和 {counts[1]} 步，权重相同。",
    )


def check_error(ranks):
    for rank in ranks:
        if rank.exit_code == 0:
            refuse(
                f"Rank {rank.rank} ended as if all was well; the other rank failed, because it lost"
                " the connection.",
                f"rank {rank.rank} 像没事一样正常结束；另一个 rank 因连接断开而失败。",
            )
    damaged = [rank for rank in ranks if says_why(rank)]
    if not damaged:
        failed = [rank for rank in ranks if rank.error and not lost_another(rank)]
        error = say(": ", "：") + describe_error(failed[0]) if failed else ""
        refuse(
            f"The program failed, but no rank said that an image is damaged{error}.",
            f"程序失败了，但没有 rank 报告有图像损坏{error}。",
        )
    rank = damaged[0].rank
    return say(
        f"rank {rank} says that an image is damaged, and no rank waits for it.",
        f"rank {rank} 报告有图像损坏，没有 rank 在等它。",
    )


def says_why(rank):
    """Return whether a rank ended because of the damaged image, and said so."""
    if rank.error:
        text = "" if lost_another(rank) else rank.error[1]
    else:
        text = rank.output if rank.exit_code else ""
    return any(word in text.lower() for word in WORDS)
