"""One rank must write the file, with the names of the plain model, before any rank reads it."""

from exercises.judge.judging import refuse, same, say, values, variable, weights_of


def check(ranks):
    writers = [rank for rank in ranks if values(rank, "save")]
    if len(writers) > 1:
        refuse(
            "Both ranks wrote a file: one rank writes, or the file may be damaged.",
            "两个 rank 都写了文件：应该只由一个 rank 写，否则文件可能损坏。",
        )
    if not writers:
        refuse(
            "No rank saved the weights with `torch.save`.", "没有 rank 用 `torch.save` 保存权重。"
        )
    (writer,) = writers
    keys = [key for saved in values(writer, "save") for key in saved]
    if wrapped := [key for key in keys if str(key).startswith("module.")]:
        refuse(
            f"The file has the keys of a DDP object, such as `{wrapped[0]}`: a program without DDP"
            " expects the keys of the model.",
            f"文件里是 DDP 对象的 key，例如 `{wrapped[0]}`：不用 DDP 的程序需要的是模型的 key。",
        )
    for rank in ranks:
        if not values(rank, "load"):
            refuse(f"Rank {rank.rank} did not load the file.", f"rank {rank.rank} 没有加载文件。")
        if rank is not writer and messages_before(rank, "load") <= messages_before(writer, "save"):
            refuse(
                f"Rank {rank.rank} read the file, but nothing told it that rank {writer.rank} had"
                " written it: expected a collective such as dist.barrier() after the save.",
                f"rank {rank.rank} 读了文件，但它无从知道 rank {writer.rank} 已经写完："
                "保存之后应该有一次集合通信操作，例如 dist.barrier()。",
            )
        if not same(weights_of(variable(rank, "loaded")), weights_of(variable(rank, "model"))):
            refuse(
                f"On rank {rank.rank}, the loaded weights are not the trained ones.",
                f"rank {rank.rank} 加载的权重不是训练好的权重。",
            )
    return say(
        f"rank {writer.rank} wrote the file, and both ranks loaded the trained weights.",
        f"rank {writer.rank} 写了文件，两个 rank 都加载了训练好的权重。",
    )


def messages_before(rank, kind):
    """Return how many messages a rank sent before the last save or the first load.

    A collective has the same number on all ranks, so the one after the save is known by its number.
    """
    places = [k for k, event in enumerate(rank.events) if event.kind == kind]
    place = places[-1] if kind == "save" else places[0]
    return sum(event.kind == "message" for event in rank.events[:place])
