"""A continued epoch must train the images that were not yet trained."""

from exercises.judge.judging import batches, refuse, refuse_unknown_images, say, steps, values

IMAGES = 256
STEPS = 8
KILLED = 3  # the step after which the job was killed


def check(ranks):
    count = len(steps(ranks[0]))
    if count != STEPS:
        refuse(
            f"The epoch had {count} training steps in all; expected {STEPS}: {KILLED}, then"
            f" {STEPS - KILLED}.",
            f"这个 epoch 总共训练了 {count} 步；"
            f"应该是 {STEPS} 步：先 {KILLED} 步，再 {STEPS - KILLED} 步。",
        )
    if len(values(ranks[0], "loader")) == 1:
        refuse(
            f"All {STEPS} training steps come from one iterator of a DataLoader. A job that starts"
            " again has no such iterator, only its checkpoint.",
            f"全部 {STEPS} 个训练步都来自同一个 DataLoader 迭代器。作业重新启动后没有这个迭代器，"
            "只有检查点。",
        )
    before, after = [], []
    for rank in ranks:
        trained = batches(rank)
        before += [number for batch in trained[:KILLED] for number in batch]
        after += [number for batch in trained[KILLED:] for number in batch]
    refuse_unknown_images(before + after)
    if again := set(before) & set(after):
        refuse(
            f"{len(again)} images were trained before and after the restart, for example image"
            f" {min(again)}; {IMAGES - len(set(before + after))} images were never trained.",
            f"有 {len(again)} 张图像在重启前后都用了，例如图像 {min(again)}；"
            f"{IMAGES - len(set(before + after))} 张从未用到。",
        )
    if missing := IMAGES - len(set(before + after)):
        refuse(
            f"{missing} of {IMAGES} images were never trained in this epoch.",
            f"在这个 epoch 中，{IMAGES} 张图像有 {missing} 张从未用到。",
        )
    return say(
        "the epoch continued where it was interrupted: each image was trained once.",
        "这个 epoch 从中断的地方继续：每张图像用了一次。",
    )
