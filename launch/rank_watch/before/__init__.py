"""The ranks against the script before its conversion: --before of check_ranks.

record.py notes in each rank what a training step gave, and rank 0 writes its first weights to a
temporary folder. When the ranks are done, the monitor starts the script before in one process
(one_process.py), which begins with these weights and reads in each batch what the ranks have read
together (repeat.py). compare.py names the first training step that differs, and why.
"""

import json
import os

VARIABLE = "CHECK_RANKS_BEFORE"  # the options, for processes that the script starts


def install(recorder):
    """Begin to record, or to repeat, if this process was started with --before."""
    if VARIABLE not in os.environ:
        return
    options = json.loads(os.environ[VARIABLE])
    if "folder" in options:
        from rank_watch.before.repeat import Repetition as Record
    else:
        from rank_watch.before.record import Record
    Record(recorder, options).install()
