"""One input of the model that is the same on all ranks, such as noise, among others that differ."""

from rank_watch.compare import COPY, RIGHT_IF_SHARED, together

SHARE = 0.9  # of the forward passes in which it must be the same
LEAST = 5  # forward passes


def install(recorder):
    """Nothing: the recorder notes the inputs of each forward pass."""


def judge(runs, judgment):
    named = ("have the same input", "same samples", "draw the same random numbers between")
    if any(words in text for words in named for text in judgment.found):
        return
    if any(run.tensor_parallel for run in runs):
        return
    by_model = {}
    trained = [[f for f in run.forwards if f.training and f.tensors] for run in runs]
    for forwards in together(trained):
        by_model.setdefault(forwards[0].model, []).append(forwards)
    for model, passes in by_model.items():
        count = len(passes[0][0].tensors)
        if len(passes) < LEAST or any(len(f.tensors) != count for one in passes for f in one):
            continue
        for place in range(count):
            columns = [[forward.tensors[place] for forward in forwards] for forwards in passes]
            same = sum(len({tensor[1] for tensor in column}) < len(runs) for column in columns)
            values = {column[0][1] for column in columns}
            # One value for all samples, or few, is a choice of the step, such as a mask.
            varied = all(column[0][2] > 1 for column in columns) and len(values) > 2
            if varied and count > 1 and same >= SHARE * len(passes):
                judgment.found.append(
                    f"input {place + 1} of {model} ({columns[0][0][0]}) is the same on two ranks "
                    f"in {same} of {len(passes)} forward passes ({passes[0][0].line}), though "
                    "others differ: numbers such as noise or timesteps, from a generator that the "
                    "ranks seed alike. Add the rank to its seed, as in "
                    f"torch.Generator().manual_seed(seed + rank). {RIGHT_IF_SHARED} ({COPY})"
                )
                return
