"""Run a script in one process, which repeats what the ranks did."""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rank_watch.before import VARIABLE
from rank_watch.before.training import Training
from rank_watch.runs import Run
from rank_watch.watched.optimizers import SCHEDULED

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
CHECK_RANKS = Path(__file__).resolve().parents[2] / "check_ranks.py"
LIMIT = 1800  # seconds


def run_one(ranks, options, folder, parts=1):
    """Run the script in one process, and return its Training.

    Args:
        ranks: Trainings of the ranks.
        options: dict of the flags of check_ranks.
        folder: Path, in which the first weights are.
        parts: backward passes in one training step, for each of a rank.
    """
    weights = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
    plan = {
        "world_size": len(ranks),
        "weights": [str(path) for path in weights],
        "settings": [[scheduled(group) for group in step.groups] for step in ranks[0].steps],
        "loaders": planned_loaders(ranks, parts),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    events = folder / "events.jsonl"
    events.unlink(missing_ok=True)
    run = ranks[0].run
    most = max(Counter(step["optimizer"] for step in run.steps).values())
    most += run.end["why"] == "end"  # does this process go on?
    command = [sys.executable, str(CHECK_RANKS), "--steps", str(most), *options["flags"]]
    with open(folder / "output", "w") as output:
        try:
            subprocess.run(
                [*command, *options["command"]],
                env=environment(options | {"folder": str(folder)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return Training(Run(0, []))
    lines = events.read_text().splitlines() if events.exists() else []
    return Training(Run(0, map(json.loads, lines)))


def scheduled(group):
    """Return the settings of a group of parameters that a scheduler changes."""
    return {name: group[name] for name in SCHEDULED if name in group}


def environment(options):
    """Return the variables of a process without a launcher, or of a world of one."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_NAMES and not name.startswith(LAUNCHERS)
    }
    env[VARIABLE] = json.dumps(options)
    if options["same"]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env


def planned_loaders(ranks, parts):
    """Return what the one process reads from each loader that trains: {key: {...}}."""
    loaders = {}
    for key in ranks[0].run.passes_over:
        if not all(rank.loader(key) for rank in ranks):
            continue
        passes = zip(*(rank.run.passes_over[key] for rank in ranks), strict=False)
        epochs = [read_together(of_ranks, parts) for of_ranks in passes]
        if all(epochs):
            length = ranks[0].loader(key).length
            loaders[key] = {"epochs": epochs, "length": length and math.ceil(length * parts)}
    return loaders


def read_together(passes, parts):
    """Return [batches, it has ended] of one pass, from that of each rank, or None: unknown."""
    ended = all(epoch.ended or epoch.cut for epoch in passes)
    together = itertools.zip_longest if ended else zip
    batches = [list(batch) for batch in together(*(epoch.batches for epoch in passes))]
    if any(one is None for batch in batches for one in batch) and not ended:
        return None
    subsets = [epoch.subset for epoch in passes]
    batches = [
        [
            sample if subset is None else [subset[sample[0]]]
            for one, subset in zip(batch, subsets, strict=True)
            for sample in one or []
        ]
        for batch in batches
    ]
    if parts > 1:
        batches = [part for batch in batches for part in divided(batch, round(parts))]
    elif parts < 1:
        count = round(1 / parts)
        groups = [batches[k : k + count] for k in range(0, len(batches), count)]
        batches = [list(itertools.chain(*group)) for group in groups]
    return [batches, ended]


def divided(batch, count):
    size = math.ceil(len(batch) / count)
    return [batch[k : k + size] for k in range(0, len(batch), size)]
