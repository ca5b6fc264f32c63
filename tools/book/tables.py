"""Make the tables of the book from the records in results/. tools/book/book.py inserts them into
the pages.
"""

import re
from statistics import mean

from common import other_flags
from tools import steps
from tools.book import gpu_figures
from tools.planning import step_model
from tools.records import (
    checkpoint_cost,
    group,
    hardware,
    published,
    ratios,
    records,
    select,
    spread,
)

EPOCHS = (1, 5, 10)  # in the table of ResNet-20

LADDER = [  # script, what it adds, command, when to use it
    ("01_snsc.py", "one device, plain PyTorch", "python 01_snsc.py", "one GPU is enough"),
    (
        "02_snmc_dp.py",
        "`nn.DataParallel`: one process, all GPUs of a machine",
        "python 02_snmc_dp.py",
        "in old code only: DDP is better on any number of GPUs",
    ),
    (
        "03_mnmc_ddp_launch.py",
        "`DistributedDataParallel`: one process per GPU, on any number of machines",
        "torchrun --nproc-per-node=2 03_mnmc_ddp_launch.py",
        "the default",
    ),
    (
        "04_mnmc_ddp_mp.py",
        "DDP, started by the script itself with `mp.spawn`",
        "python 04_mnmc_ddp_mp.py --nproc-per-node 2",
        "where torchrun is not possible, as in a debugger",
    ),
    (
        "05_mnmc_ddp_slurm.py",
        "DDP, started by Slurm",
        "srun --nodes=2 --ntasks-per-node=2 python 05_mnmc_ddp_slurm.py",
        "on a Slurm cluster",
    ),
    (
        "06_imagenet.py",
        "checkpoints, machines that join and fail, recipes",
        "torchrun --nproc-per-node=2 06_imagenet.py --dummy 2048 --image-size 64 --epochs 2",
        "for long trainings",
    ),
    (
        "07_fsdp.py",
        "`fully_shard` (FSDP2): each process keeps a part of the model",
        "torchrun --nproc-per-node=2 07_fsdp.py",
        "if the model does not fit into one GPU",
    ),
]


def table(head, rows):
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def by_hardware(runs, render):
    """Format one block per machine: its name, and render(runs on this machine)."""
    machines = group([run | {"machine": hardware(run)} for run in runs], "machine")
    return "\n\n".join(f"On {machine}:\n\n{render(runs)}" for machine, runs in machines.items())


def by_command(runs, render):
    """Format one block per command: the command, the number of repeats, and render(runs of this
    command).
    """
    blocks = []
    for command, same in group(runs, "command").items():
        repeats = len({run["repeat"] for run in same})
        blocks.append(f"`{without_outputs(command)}`, {repeats} runs of each:\n\n{render(same)}")
    return "\n\n".join(blocks)


def without_outputs(command):
    """Remove the flags that say where a command writes its output."""
    return re.sub(r" --(log-file|checkpoints-path|tensorboard) \S+", "", command)


def speeds(runs):
    """Return the images per second of each run."""
    return [run["images_per_second"] for run in runs]


def peak_memory(runs):
    """Return the peak memory of several runs, or an empty text if it was not measured."""
    measured = [run["peak_memory_mib"] for run in runs if "peak_memory_mib" in run]
    return f"{max(measured)} MiB" if measured else ""


def ladder():
    """Make the table of the scripts: what each adds, the size of its diff, and when to use it."""
    rows = []
    for script, adds, command, use in LADDER:
        size = f"{len(steps.read(script))} lines"
        if script in steps.STEPS:
            added, removed = steps.size(script)
            size = f"+{added} -{removed} on `{steps.STEPS[script].parent[:2]}`"
        chapter = f"[chapter](docs/{script[:-3]}.md)"
        rows.append((f"[`{script}`]({script})", adds, f"`{command}`", size, use, chapter))
    return table(("script", "adds", "command", "size", "use it", "read"), rows)


def cifar10():
    """Make the table of our CIFAR-10 runs on one device and the published run, epoch by epoch."""

    def render(runs):
        epochs = sorted({run["epoch"] for run in runs})
        rows = [
            (
                "train, published",
                *(f"{acc:.1f}" for acc in published()["cifar10"]["runs"][0]["train_acc"]),
            )
        ]
        for name, key in (("train, here", "train_acc"), ("test, here", "test_acc")):
            values = [[run[key] for run in runs if run["epoch"] == epoch] for epoch in epochs]
            rows.append((name, *(f"{mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values)))
        seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
        return (
            f"{table(('accuracy in % after epoch', *epochs), rows)}\n\nHere: "
            f"seeds {seeds}, mean (range)."
        )

    return by_hardware(select(published_setting(), world_size=1), render)


def cifar_resnet20():
    """Make the table of ResNet-20 on CIFAR-10: the published log, one process and two."""

    def render(runs):
        known = published()["cifar_resnet20"]
        rows = []
        for name, key in (("train", "train_acc"), ("test", "test_acc")):
            rows.append(
                (f"{name}, published", *(f"{known[key][epoch - 1]:.1f}" for epoch in EPOCHS))
            )
            for processes in (1, 2):
                same = [run for run in runs if run["world_size"] == processes]
                values = {run["epoch"]: f"{run[key]:.1f}" for run in same}
                script = "`01`" if processes == 1 else "`03`, two processes"
                rows.append((f"{name}, {script}", *(values[epoch] for epoch in EPOCHS)))
        return table(("accuracy in % after epoch", *EPOCHS), rows)

    return by_hardware(records("resnet20"), render)


def published_setting():
    """Return the records of the accuracy experiment on all of CIFAR-10, with the published number
    of epochs.
    """
    runs = select(records("accuracy"), model="resnet18", limit=None, amp="none")
    runs = [run for run in runs if run["dataset"] == "cifar10" or run["data_dir"] == "data/cifar10"]
    complete = [run for run in group(runs, "started", "command").values() if run[-1]["epoch"] == 5]
    return [record for run in complete for record in run]


def accuracy():
    """Make the table of CIFAR-10 by number of processes: tools/experiments.py accuracy."""
    published_accuracy = {
        run["world_size"]: run["train_acc"][-1] for run in published()["cifar10"]["runs"]
    }

    def render(runs):
        last = [run[-1] for run in group(runs, "started", "command").values()]
        rows = []
        for setting, seeds in sorted(
            group(last, "global_batch", "lr", "warmup_epochs", "world_size").items()
        ):
            (global_batch, lr, warmup, n), batch = setting, seeds[0]["batch_size"]
            known = (
                f"{published_accuracy[n]:.1f}"
                if batch == 256 and not warmup and n in published_accuracy
                else ""
            )
            train, test = (
                f"{mean(run[key] for run in seeds):.1f}" for key in ("train_acc", "test_acc")
            )
            lr = f"{lr:g}" + (
                f", warmed up for {warmup:g} epoch{'s' * (warmup != 1)}" if warmup else ""
            )
            rows.append((f"{n} x {batch} = {global_batch}", lr, train, known, test, len(seeds)))
        head = (
            "processes x images = global batch",
            "learning rate",
            "train (%)",
            "published (%)",
            "test (%)",
            "seeds",
        )
        return table(head, rows)

    return by_hardware(published_setting(), render)


def first_runs():
    """Make the table of the last epoch of every run in results/first_runs."""
    head = (
        "command",
        "test accuracy",
        "last epoch took",
        "images/s",
        "waiting for data",
        "peak memory",
    )

    def render(runs):
        rows = [
            (
                f"`{without_outputs(run['command'])}`",
                f"{run['test_acc']:.2f} %",
                f"{run['seconds']:.0f} s",
                f"{run['images_per_second']:.0f}",
                f"{100 * run['data_wait_share']:.1f} %",
                peak_memory([run]),
            )
            for run in {run["started"]: run for run in runs}.values()
        ]
        return table(head, rows)

    return by_hardware(records("first_runs"), render)


def input():
    """Make the table of the loops of tools/bench/input.py."""
    head = ("loop", "images/s, median (range)", "`01` (or our loader) divided by it", "peak memory")

    def render(runs):
        loops = group(runs, "loop")
        rows = []
        for loop, same in loops.items():
            ours = loops["our loader" if "loader" in loop else "01"]
            ratio = spread(ratios(ours, same), ".2f") if same is not ours else ""
            name = f"{loop}, 1 worker" if "loader" in loop else loop
            rows.append((name, spread(speeds(same), ".0f"), ratio, peak_memory(same)))
        return table(head, rows)

    return by_hardware(
        select(records("input"), bench="input"), lambda runs: by_command(runs, render)
    )


def ddp():
    """Make the table of the cost and the speedup of DistributedDataParallel: tools/bench/ddp.py."""
    head = (
        "processes x threads",
        "variant",
        "images/s, median (range)",
        "efficiency",
        "exposed communication",
    )

    def render(runs):
        variants = group(runs, "world_size", "threads", "variant")
        rows = []
        for (processes, threads, variant), same in variants.items():
            efficiency = [r / processes / threads for r in ratios(same, variants[1, 1, "plain"])]
            no_sync = variants.get((processes, threads, "no_sync"))
            exposed = ""
            if no_sync and variant != "no_sync":
                exposed = spread([1 - r for r in ratios(same, no_sync)], ".2f")
            cells = (
                f"{processes} x {threads}",
                variant,
                spread(speeds(same), ".0f"),
                spread(efficiency, ".2f"),
                exposed,
            )
            rows.append(cells)
        return table(head, rows)

    return by_hardware(select(records("ddp"), bench="ddp"), lambda runs: by_command(runs, render))


def launch():
    """Make the table of the seconds from torchrun to the first training step of 03:
    tools/bench/ddp.py.
    """

    def render(runs):
        launches = group(runs, "world_size")
        times = (spread([run["seconds"] for run in same], ".1f") for same in launches.values())
        return table(("processes", *launches), [("seconds, median (range)", *times)])

    return by_hardware(select(records("ddp"), bench="launch"), render)


def imagenet():
    """Make the table of the first and last epochs of every run in results/imagenet."""
    head = (
        "command",
        "train loss",
        "test top-1, top-5",
        "images/s",
        "waiting for data, for gradients",
    )

    def render(runs):
        rows = [
            (
                f"`{without_outputs(run[-1]['command'])}`",
                f"{run[0]['train_loss']:.2f} -> {run[-1]['train_loss']:.2f}",
                f"{run[-1]['test_acc']:.2f} %, {run[-1]['test_top5']:.2f} %",
                f"{run[-1]['images_per_second']:.0f}",
                (
                    f"{100 * run[-1]['data_wait_share']:.1f} %, "
                    f"{100 * run[-1]['communication_share']:.1f} %"
                ),
            )
            for run in group(runs, "started").values()
        ]
        return table(head, rows)

    return by_hardware(records("imagenet"), render)


def train():
    """Make the table of the cost of 06 beside the bare training step: tools/bench/train.py."""
    head = (
        "run",
        "images/s, median (range)",
        "divided by the bare step (the classic loader)",
        "peak memory",
    )

    def render(runs):
        kinds = group(runs, "run")
        rows = []
        for name, same in kinds.items():
            base = kinds.get("classic loader" if "loader" in name else "bare")
            ratio = spread(ratios(same, base), ".3f") if base and same is not base else ""
            rows.append((name, spread(speeds(same), ".1f"), ratio, peak_memory(same)))
        if "checkpoints" not in kinds:
            return table(head, rows)
        costs = [
            100 * checkpoint_cost(without["images_per_second"], saving["images_per_second"], saving)
            for without, saving in zip(kinds["dummy"], kinds["checkpoints"], strict=True)
        ]
        return (
            f"{table(head, rows)}\n\nA checkpoint every 100 steps costs "
            f"{spread(costs, '.2f')} % of the time."
        )

    return by_hardware(records("train"), lambda runs: by_command(runs, render))


def drill():
    """Make the table of the drills: the last run of each drill in tools/lab/drill.py."""
    from tools.lab.drill import DRILLS

    def render(runs):
        rows = []
        for run in {run["drill"]: run for run in runs}.values():
            what = DRILLS[run["drill"]].what
            world = f"{run['before']} -> {run['after']}"
            rows.append(
                (f"`{run['drill']}`", what, run["steps_lost"], f"{run['seconds']:.1f} s", world)
            )
        setting = (
            f"A checkpoint every {runs[-1]['checkpoint_every']} steps, --timeout "
            f"{runs[-1]['timeout']}:"
        )
        head = ("drill", "what happens", "steps lost", "time to the next step", "processes")
        return f"{setting}\n\n{table(head, rows)}"

    return by_hardware(records("drill"), render)


def flags():
    """Make the tables of the flags of other trainings, and what to type for 06."""
    tables = other_flags.OF_06.items()
    return "\n\n".join(other_table(name, "`06_imagenet.py`", rows) for name, rows in tables)


def flags_of_rungs():
    """Make the same tables for 01 to 05."""
    there = other_flags.MNIST + other_flags.COURSE + other_flags.SYNC_BN
    return "\n\n".join(
        [
            other_table("MNIST examples, courses", "`01_snsc.py` to `05_mnmc_ddp_slurm.py`", there),
            other_table("scripts with mp.spawn", "`04_mnmc_ddp_mp.py`", other_flags.SPAWN),
        ]
    )


def other_table(there, here, pairs):
    """Make a table of what is typed there and here."""
    rows = [(theirs, ours if other_flags.is_prose(ours) else f"`{ours}`") for theirs, ours in pairs]
    return table((there, here), rows)


def memory():
    """Make the table of the memory, the bytes sent and the speed of DDP and FSDP:
    tools/bench/memory.py.
    """
    head = (
        "variant",
        "peak memory per rank",
        "`tools/fit.py`",
        "held between steps",
        "sent per rank and step",
        "images/s, median (range)",
        "divided by DDP",
    )

    def megabytes(size):
        return f"{size / 1e6:,.0f} MB"

    def block(runs):
        runs = sorted(runs, key=lambda run: (run["row"], run["repeat"]))
        first = runs[0]
        size = first["image_size"]
        repeats = len({run["repeat"] for run in runs})
        base = select(runs, name="DDP")
        rows = []
        for variant, same in group(runs, "variant").items():
            peak = max(run["peak_bytes"] for run in same)
            computed = same[0]["computed_peak_bytes"]
            cells = (
                variant,
                megabytes(peak),
                f"{megabytes(computed)}, {100 * (computed / peak - 1):+.1f} %",
                megabytes(sum(same[0]["held_bytes"].values())),
                megabytes(same[0]["sent_bytes"]),
                spread(speeds(same), ".1f"),
                spread(ratios(same, base), ".2f"),
            )
            rows.append(cells)
        return (
            f"`{first['model']}`, {first['batch_size']} images of {size}x{size} per process, "
            f"{repeats} runs of each:\n\n{table(head, rows)}"
        )

    def render(runs):
        models = group(runs, "model", "image_size", "batch_size")
        return "\n\n".join(block(same) for same in models.values())

    return by_hardware(records("memory"), render)


def my_ddp():
    """Make the table of the DDP of the exercises beside torch's: tools/bench/my_ddp.py."""
    from tools.bench.my_ddp import HEAD, rows

    def block(runs):
        first = runs[0]
        repeats = len(select(runs, variant=first["variant"]))
        return (
            f"`{first['model']}`, {first['batch_size']} images per process, "
            f"{first['world_size']} processes, {repeats} runs of each:\n\n{table(HEAD, rows(runs))}"
        )

    def render(runs):
        settings = group(runs, "model", "batch_size", "world_size")
        return "\n\n".join(block(same) for same in settings.values())

    return by_hardware(records("my_ddp"), render)


def planning():
    """The efficiencies that others have published, beside the band of the planning model."""
    rows = []
    for name, run in published()["scaling"].items():
        band = step_model.published_band(run)
        error = round(100 * step_model.distance(run["efficiency"], band), 1)
        rows.append(
            (
                name,
                f"{run['devices']}, {run['gpus_per_node']} per node",
                f"{run['network_gbits']} Gbit/s" if run["network_gbits"] else "one node",
                f"{run['efficiency']:.0%}",
                f"{band[0]:.0%} to {band[1]:.0%}",
                f"{error:+.1f}" if error else "0",
            )
        )
    return table(
        ("run", "GPUs", "network of a node", "published", "model", "outside, in points"), rows
    )


def gpu(results=None):
    """Make the figure and the tables of measured and published speeds on GPUs; none before a GPU is
    recorded.
    """
    tables = [table(head, rows) for head, rows in gpu_figures.blocks(results)]
    if not tables:
        return ""
    alt = "Images per second of ResNet-50 on one GPU, measured here and published"
    sources = [f"- {name}: {text}" for name, text in gpu_figures.published()["sources"].items()]
    return "\n\n".join([f"![{alt}](figures/gpu.png)", *tables, "\n".join(sources)])


TABLES = (
    ladder,
    cifar10,
    cifar_resnet20,
    accuracy,
    first_runs,
    input,
    ddp,
    launch,
    imagenet,
    train,
    drill,
    memory,
    my_ddp,
    planning,
    flags,
    flags_of_rungs,
    gpu,
)
TABLES = {function.__name__: function for function in TABLES}
