"""One rank must write the file, with the names of the plain model, before any rank reads it."""

from exercises.judge.judging import refuse, same, values, variable, weights_of
from exercises.sentences import say


def check(ranks):
    writers = [rank for rank in ranks if values(rank, "save")]
    if len(writers) > 1:
        refuse("Both ranks wrote a file: one rank writes, or the file may be damaged.")
    if not writers:
        refuse("No rank wrote a file with `torch.save`: give it the path, or an open file.")
    (writer,) = writers
    keys = [key for saved in values(writer, "save") for key in saved]
    if wrapped := [key for key in keys if key.startswith("module.")]:
        refuse(
            "The file has the keys of a DDP object, such as `{key}`: a program without DDP"
            " expects the keys of the model.",
            key=wrapped[0],
        )
    for rank in ranks:
        if not values(rank, "load"):
            refuse("Rank {rank} did not load the file.", rank=rank.rank)
        if rank is not writer and messages_before(rank, "load") <= messages_before(writer, "save"):
            refuse(
                "Rank {rank} read the file, but no collective told it that rank {writer} had"
                " written it: expected one such as dist.barrier() after the save.",
                rank=rank.rank,
                writer=writer.rank,
            )
        if not same(weights_of(variable(rank, "loaded")), weights_of(variable(rank, "model"))):
            refuse("On rank {rank}, the loaded weights are not the trained ones.", rank=rank.rank)
    return say(
        "rank {writer} wrote the file, and both ranks loaded the trained weights.",
        writer=writer.rank,
    )


def messages_before(rank, kind):
    """Return how many messages a rank sent before the last save or the first load.

    A collective has the same number on all ranks, so the one after the save is known by its number.
    """
    places = [k for k, event in enumerate(rank.events) if event.kind == kind]
    place = places[-1] if kind == "save" else places[0]
    return sum(event.kind == "message" for event in rank.events[:place])
