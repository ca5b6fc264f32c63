"""The ranks must train one model, with the gradients of all ranks."""

from exercises.judge.judging import refuse_other_training, refuse_repeated_images, say, steps


def check(ranks):
    refuse_other_training(ranks)
    refuse_repeated_images(ranks, 256)
    count = len(steps(ranks[0]))
    return say(
        f"after each of {count} training steps, the ranks had the same weights as one process that"
        " trains on the images of both.",
        f"共 {count} 个训练步，每步之后，两个 rank 的权重都与单进程用这两份图像训练的结果相同。",
    )
