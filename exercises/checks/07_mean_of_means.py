"""The mean loss must be the mean over all images."""

from torch import nn

from exercises.judging import evaluated, refuse, say, variable


def check(ranks):
    data = ranks[0].data
    targets = data[:, :4].argmax(dim=1)
    losses = nn.functional.cross_entropy(
        variable(ranks[0], "model")(data), targets, reduction="none"
    )
    losses = losses.detach()
    truth = float(losses.mean())
    found = float(variable(ranks[0], "mean_loss"))
    sizes = [len(evaluated(rank)) for rank in ranks]
    if sizes == [100, 100]:
        refuse(
            "Each rank evaluated all 100 images: they should share the work.",
            "每个 rank 都评估了全部 100 张图像：各 rank 应该分工。",
        )
    if abs(found - truth) > 2e-5:
        of_ranks = float(losses[:70].mean() + losses[70:].mean()) / 2
        why = say("batches and ranks have different sizes", "各 batch、各 rank 的图像数不同")
        if abs(found - of_ranks) < 2e-5:
            why = say("rank 0 has 70 images, rank 1 has 30", "rank 0 有 70 张图像，rank 1 有 30 张")
        refuse(
            f"The program found a mean loss of {found:.4f}, but the mean of the 100 images is"
            f" {truth:.4f}: {why}.",
            f"程序得到的平均损失为 {found:.4f}，而 100 张图像的平均损失为 {truth:.4f}：{why}。",
        )
    return say(
        f"{found:.4f} is the mean loss of 100 images.", f"{found:.4f} 是 100 张图像的平均损失。"
    )
