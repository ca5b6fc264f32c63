"""Plan a data-parallel training: its speed on many GPUs.

    python tools/plan.py --gpus 64 --step-ms 180 --gradients-mb 440 --network-gbit 100

Measure --step-ms on one GPU. The model is in tools/planning/; docs/performance.md compares it
with published results.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import UserError, one_line_errors
from common.flags import Parser, add_flags, number, whole_number
from tools.planning import step_model
from tools.planning.layers import torchvision_layers


def parse_args():
    parser = Parser(__doc__)
    positive = number(above=0)
    required = {"required": True, "type": positive}
    add = parser.add_argument
    count = {"type": whole_number(1), "metavar": "N"}
    add("--gpus", required=True, **count, help="of all machines together")
    add("--gpus-per-machine", default=8, **count, help="GPUs of a machine")
    add("--step-ms", **required, metavar="MS", help="a training step of one GPU alone")
    # fmt: off
    add_flags(parser.add_mutually_exclusive_group(required=True), [
        ("--gradients-mb MB", positive, None,
         "4 bytes per weight in float32; assumed to become ready evenly"),
        ("--model NAME", str, None,
         "a torchvision model instead, whose gradients become ready layer by layer"),
    ])
    text = "of all network cards of a machine together, per second"
    add("--network-gbit", **required, metavar="GBIT", help=text)
    add_flags(parser, [
        ("--inside-gbytes GB", positive, 240,
         "between the GPUs of a machine, per second: 10 for PCIe, 240 for an A100's NVLink"),
        ("--batch-size N", whole_number(1), None,
         "images per GPU and training step, to print images per second"),
        ("--jitter-percent X", number(), 100 * step_model.SPREAD,
         "standard deviation of the step time between GPUs"),
    ])
    # fmt: on
    return parser.parse_args()


def training_step(args):
    """Return (Step of one GPU, how its gradients become ready)."""
    seconds = args.step_ms / 1000
    if args.model is None:
        return step_model.even_step(seconds, args.gradients_mb * 1e6), "evenly"
    try:
        layers = torchvision_layers(args.model)
    except UserError as error:
        raise UserError(f"--model {error}; give --gradients-mb instead") from None
    return step_model.layered_step(seconds, layers), f"as in {args.model}"


def speed(args):
    """Return the lines about speed."""
    step, order = training_step(args)
    cluster = step_model.Cluster(
        args.gpus_per_machine, args.network_gbit * 1e9 / 8, args.inside_gbytes * 1e9
    )
    band = step_model.efficiency_band(step, args.gpus, cluster, args.jitter_percent / 100)
    slow, fast = (step.total / efficiency for efficiency in band)
    lines = [
        f"GPUs:           {args.gpus}, {min(args.gpus, args.gpus_per_machine)} per machine, with "
        f"{args.network_gbit:g} Gbit/s",
        f"gradients:      {sum(step.buckets) / 1e6:.0f} MB, ready {order}",
        f"efficiency:     {100 * band[0]:.0f} % to {100 * band[1]:.0f} %, "
        "without and with perfect overlap",
        f"training step:  {1000 * slow:.0f} to {1000 * fast:.0f} ms",
    ]
    if args.batch_size:
        images = args.gpus * args.batch_size
        lines.append(f"images/s:       {images / slow:.0f} to {images / fast:.0f}")
    return lines


def main(args):
    print("\n".join(speed(args)))


if __name__ == "__main__":
    with one_line_errors():
        main(parse_args())
