"""Each image must count once in the evaluation, on one of the ranks."""

from collections import Counter

from exercises.judging import evaluated, refuse, say, variable

IMAGES = 101


def check(ranks):
    correct, total = (int(variable(ranks[0], name)) for name in ("correct", "total"))
    data = ranks[0].data
    targets = data[:, :4].argmax(dim=1)
    truth = int((variable(ranks[0], "model")(data).argmax(dim=1) == targets).sum())
    if all(len(set(evaluated(rank))) == IMAGES for rank in ranks):
        refuse(
            f"Each rank evaluated all {IMAGES} images: they should share the work.",
            f"每个 rank 都评估了全部 {IMAGES} 张图像：各 rank 应该分工。",
        )
    counts = Counter(number for rank in ranks for number in evaluated(rank))
    if missing := IMAGES - len(counts):
        refuse(
            f"{missing} of {IMAGES} images were not evaluated.",
            f"{IMAGES} 张图像中，有 {missing} 张没有评估。",
        )
    if total != IMAGES:
        number, times = counts.most_common(1)[0]
        refuse(
            f"The program counted {total} answers for {IMAGES} images: image {number} was"
            f" evaluated {times} times.",
            f"程序对 {IMAGES} 张图像统计了 {total} 个预测结果：图像 {number} 评估了 {times} 次。",
        )
    if correct != truth:
        refuse(
            f"The program counted {correct} correct answers, but {truth} of {IMAGES} are correct.",
            f"程序统计的正确数是 {correct}，实际上 {IMAGES} 个中有 {truth} 个正确。",
        )
    return say(
        f"each of {IMAGES} images counts once, and {truth} answers are correct.",
        f"{IMAGES} 张图像各计入一次，其中 {truth} 张预测正确。",
    )
