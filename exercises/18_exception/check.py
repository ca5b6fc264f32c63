"""After a damaged image, all ranks must end, or all must train on, with equal weights."""

from exercises.judge.judging import (
    batches,
    describe_error,
    gradients_of,
    images,
    lost_another,
    refuse,
    refuse_different_ends,
    same,
    steps,
    values,
    variable,
    weights_of,
)
from exercises.sentences import say

MAY_FAIL = True
BATCHES = 4  # of each rank
DAMAGED = 48  # the number of the image
WORDS = ("damage", "corrupt", "broken", "nan", "finite", "invalid", "bad", "image")  # that say why
CHINESE_WORDS = ("坏", "图", "无效", "异常", "有限")


def check(ranks):
    if any(rank.exit_code != 0 for rank in ranks):
        return check_error(ranks)
    if any(DAMAGED in images(rank) for rank in ranks):
        refuse(
            "Image {image} is not damaged any more: keep the line that damages it, because real"
            " data has such images.",
            image=DAMAGED,
        )
    counts = [len(steps(rank)) for rank in ranks]
    weights = [weights_of(variable(rank, "model")) for rank in ranks]
    if any(weight.isnan().any() for of_rank in weights for weight in of_rank):
        refuse("The weights are not numbers (NaN): the damaged image was trained.")
    refuse_different_ends(ranks)
    if min(counts) < BATCHES - 1:
        refuse(
            "The ranks ended without an error after training step {least}; one damaged image"
            " costs at most one of {steps} steps.",
            least=min(counts),
            steps=BATCHES,
        )
    refuse_other_gradients(ranks)
    return say(
        "the ranks took {counts[0]} and {counts[1]} training steps, and their weights are equal.",
        counts=counts,
    )


def refuse_other_gradients(ranks):
    """Refuse a step whose gradient is not that of its images, if the ranks have equally many."""
    for k, parts in enumerate(zip(*map(batches, ranks), strict=False)):
        numbers = [number for part in parts for number in part]
        if not numbers or -1 in numbers or len(set(map(len, parts))) > 1:
            continue  # the task does not say what to do with the others of a damaged batch
        step = values(ranks[0], "before")[k]
        gradients = [gradient for gradient in step.gradients if gradient is not None]
        if not same(gradients, gradients_of(ranks[0], step.weights, numbers), 1e-5):
            refuse(
                "In training step {step}, the gradient is not that of the images with their"
                " labels.",
                step=k + 1,
            )


def check_error(ranks):
    for rank in ranks:
        if rank.exit_code == 0:
            refuse(
                "Rank {rank} ended as if all was well; the other rank failed, because it lost the"
                " connection.",
                rank=rank.rank,
            )
    damaged = [rank for rank in ranks if says_why(rank)]
    if not damaged:
        failed = [rank for rank in ranks if rank.error and not lost_another(rank)]
        error = say(": {error}", error=describe_error(failed[0])) if failed else ""
        refuse("The program failed, but no rank said that an image is damaged{error}.", error=error)
    rank = damaged[0].rank
    return say("rank {rank} says that an image is damaged, and no rank waits for it.", rank=rank)


def says_why(rank):
    """Return whether a rank ended because of the damaged image, and said so."""
    if rank.error:
        text = "" if lost_another(rank) else rank.error[1]
    else:
        text = rank.output if rank.exit_code else ""
    return any(word in text.lower() for word in WORDS + CHINESE_WORDS)
