"""Compare what the ranks did, and say what is wrong in sentences."""

from rank_watch import watched
from rank_watch.compare import Judgment


def judge(runs):
    """Return the Judgment on the runs of all ranks."""
    judgment = Judgment([], [], [])
    if any(run.tensor_parallel for run in runs):
        judgment.notes.append(
            "under tensor parallelism ranks share batches and random numbers: neither was compared"
        )
    for event in runs[0].noted["missing"]:
        judgment.notes.extend(f"this torch has no {name}: not watched" for name in event["names"])
    for kind in watched.KINDS:
        kind.judge(runs, judgment)
    return judgment
