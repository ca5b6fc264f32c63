"""Each image must count once in the evaluation, on one of the ranks."""

from collections import Counter

from exercises.judge.judging import evaluated, refuse, say, variable

IMAGES = 101
LEAST = 40  # images of a rank: about half of them


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
    if missing := len(set(range(IMAGES)) - set(counts)):
        refuse(
            f"Images that were not evaluated: {missing} of {IMAGES}.",
            f"{IMAGES} 张图像中，有 {missing} 张没有评估。",
        )
    sizes = [len(evaluated(rank)) for rank in ranks]
    if min(sizes) < LEAST:
        refuse(
            f"Rank 0 evaluated {sizes[0]} images and rank 1 {sizes[1]}: each should evaluate about"
            " half of them.",
            f"rank 0 评估了 {sizes[0]} 张图像，rank 1 评估了 {sizes[1]} 张："
            "每个 rank 应该评估约一半。",
        )
    number, times = counts.most_common(1)[0]
    reason = ""
    if total == sizes[0]:
        reason = say(", those of rank 0 alone", "，这只是 rank 0 的结果")
    elif times > 1:
        reason = say(f": image {number} was evaluated twice", f"：图像 {number} 评估了两次")
    if total != IMAGES:
        refuse(
            f"The program counted {total} answers for {IMAGES} images{reason}.",
            f"程序对 {IMAGES} 张图像统计了 {total} 个预测结果{reason}。",
        )
    if correct != truth:
        refuse(
            f"The program counted {correct} correct answers, but {truth} of {IMAGES} are correct"
            f"{reason}.",
            f"程序统计的正确数是 {correct}，实际上 {IMAGES} 个中有 {truth} 个正确{reason}。",
        )
    return say(
        f"each of {IMAGES} images counts once, and {truth} answers are correct.",
        f"{IMAGES} 张图像各计入一次，其中 {truth} 张预测正确。",
    )
