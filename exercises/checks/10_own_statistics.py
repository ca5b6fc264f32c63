"""Both ranks must evaluate the same model: weights and running statistics."""

from exercises.judging import refuse, same, say, values


def check(ranks):
    evaluated = [
        [list(buffers.values()) for training, buffers in values(rank, "batch norm") if not training]
        for rank in ranks
    ]
    if not all(evaluated):
        refuse(
            "The evaluation used the statistics of its own batch: expected model.eval() before it.",
            "评估时，BN 用的是当前 batch 的统计量：评估之前应该调用 model.eval()。",
        )
    a, b = (buffers[0] for buffers in evaluated)
    if not same([x.float() for x in a], [x.float() for x in b]):
        refuse(
            f"The ranks evaluated different models: the running mean of the first pixel is"
            f" {float(a[0][0]):.6f} on rank 0 and {float(b[0][0]):.6f} on rank 1.",
            "各 rank 评估的模型不同：第一个像素的 running mean"
            f" 在 rank 0 上是 {float(a[0][0]):.6f}，"
            f"在 rank 1 上是 {float(b[0][0]):.6f}。",
        )
    if float(a[0].abs().sum()) == 0:
        refuse(
            "The running statistics are as before the training: the evaluation needs those that"
            " training has collected.",
            "滑动均值和方差还是训练之前的值：评估要用训练中得到的值。",
        )
    return say(
        "both ranks evaluated the same weights and the same running statistics.",
        "两个 rank 评估时，权重相同，滑动均值和方差也相同。",
    )
