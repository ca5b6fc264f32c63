"""What is watched, one file for each kind of mistake.

A file has install(recorder), which runs in each rank and makes torch report to recorder.add(NAME,
...), and judge(runs, judgment), which runs in the monitor, where run.noted[NAME] has these events,
each with the number of training steps before it. A new kind is a file and its name in KINDS.

The monitor starts without torch, which takes seconds: there, `torch` is None in these files.
"""

from rank_watch.watched import (
    accumulation,
    clipping,
    collectives,
    evaluations,
    files,
    gradients,
    inputs,
    loaded,
    loaders,
    losses,
    models,
    modes,
    one_input,
    optimizers,
    random_numbers,
    samples,
    schedulers,
    sharding,
)

KINDS = (  # in this order: a finding may leave out another one that is its consequence
    *(models, optimizers, gradients, clipping, schedulers, loaded, sharding, losses),
    *(loaders, inputs, random_numbers, samples, one_input, evaluations),
    *(modes, accumulation, files, collectives),
)
