"""Measure on this machine: runs in turn, ratios.

python tools/bench.py input    what feeding the network costs
python tools/bench.py ddp      what DistributedDataParallel costs, and what it gives
python tools/bench.py train    what 06 costs beside the bare step, and a checkpoint
torchrun … tools/bench.py scaling    what all_reduce and a step cost, by number of processes
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import one_line_errors
from common.flags import Parser, whole_number
from tools import bench_ddp, bench_input, bench_scaling, bench_train

BENCHES = {"input": bench_input, "ddp": bench_ddp, "train": bench_train, "scaling": bench_scaling}


def parse_args():
    parser = Parser("\n".join([__doc__, *(bench.__doc__ for bench in BENCHES.values())]))
    parser.add_argument("bench", choices=tuple(BENCHES), help="what to measure")
    parser.add_argument("--repeats", type=whole_number(1), default=5, metavar="N", help="runs of each")
    for bench in BENCHES.values():
        bench.add_flags(parser)
    # For input: long enough that the batches which workers make ahead, before the clock starts, count for little.
    parser.set_defaults(limit=100 * 256)
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors():
        args = parse_args()
        BENCHES[args.bench].main(args)
