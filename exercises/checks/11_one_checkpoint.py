"""One rank must write the file, with the names of the plain model, before any rank reads it."""

from exercises.judging import refuse, same, say, values, variable, weights_of


def check(ranks):
    writers = [rank.rank for rank in ranks if values(rank, "save")]
    if len(writers) > 1:
        refuse(
            "Both ranks wrote a file: one rank writes, or the file may be damaged.",
            "两个 rank 都写了文件：应该只由一个 rank 写，否则文件可能损坏。",
        )
    if not writers:
        refuse(
            "No rank saved the weights with `torch.save`.", "没有 rank 用 `torch.save` 保存权重。"
        )
    for rank in ranks:
        if not values(rank, "load"):
            refuse(f"Rank {rank.rank} did not load the file.", f"rank {rank.rank} 没有加载文件。")
        if not same(weights_of(variable(rank, "loaded")), weights_of(variable(rank, "model"))):
            refuse(
                f"On rank {rank.rank}, the loaded weights are not the trained ones.",
                f"rank {rank.rank} 加载的权重不是训练好的权重。",
            )
    return say(
        f"rank {writers[0]} wrote the file, and both ranks loaded the trained weights.",
        f"rank {writers[0]} 写了文件，两个 rank 都加载了训练好的权重。",
    )
