"""The tables of the book, made from results/, so that no number is typed by hand: tools/book/book.py fills them in."""

import re
from statistics import mean, median

from tools import steps
from tools.records import ROOT, checkpoint_cost, group, hardware, published, records, select, spread

LADDER = [
    ("01_snsc.py", "one device, plain PyTorch", "python 01_snsc.py"),
    ("02_snmc_dp.py", "`nn.DataParallel`: one process, all GPUs of a machine", "python 02_snmc_dp.py"),
    (
        "03_mnmc_ddp_launch.py",
        "`DistributedDataParallel`: one process a GPU, on any number of machines",
        "torchrun --nproc-per-node=2 03_mnmc_ddp_launch.py",
    ),
    (
        "04_mnmc_ddp_mp.py",
        "the same, started by the script itself with `mp.spawn`",
        "python 04_mnmc_ddp_mp.py --nproc-per-node 2",
    ),
    (
        "05_mnmc_ddp_slurm.py",
        "the same, started by Slurm",
        "srun --nodes=2 --ntasks-per-node=2 python 05_mnmc_ddp_slurm.py",
    ),
    (
        "06_imagenet.py",
        "a real training: checkpoints, processes that come and go, recipes",
        "torchrun --nproc-per-node=2 06_imagenet.py data/imagenet",
    ),
]


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def ladder():
    """The scripts, what each adds, how many lines of its parent it changes, and what that gave here."""
    results, machine, repeats = measured()
    rows = []
    for script, adds, command in LADDER:
        size = f"{len((ROOT / script).read_text().splitlines())} lines"
        if script in steps.STEPS:
            added, removed = steps.size(script)
            size = f"+{added} -{removed} on `{steps.STEPS[script].parent[:2]}`"
        chapter = f"[chapter](docs/{script[:-3]}.md)"
        rows.append((f"[`{script}`]({script})", adds, f"`{command}`", size, results[script], chapter))
    head = ("script", "adds", "started with", "size", "measured", "read")
    return f"{table(head, rows)}\n\nMeasured on {machine}: median of {repeats} runs."


def measured():
    """({script: speed on two cores against one process on one, or what 06 costs}, machine, runs of each)."""
    machine, runs = next(iter(group([r | {"on": hardware(r)} for r in records("speed")], "on").items()))
    whole = [r for r in runs if r["batch_size"] == 128]
    base = {r["seed"]: r["images_per_second"] for r in whole if r["script"] == "01_snsc.py" and r["cpu_threads"] == 1}
    results = {}
    for script, some in group(whole, "script").items():
        both = [r for r in some if r["world_size"] * r["cpu_threads"] == 2]
        ratio = median(r["images_per_second"] / base[r["seed"]] for r in both)
        results[script] = f"{ratio:.2f} x the speed of one core"
    costs = [r for r in records("train") if hardware(r) == machine and r["image_size"] == 224]
    bare, dummy = ([r["images_per_second"] for r in select(costs, run=run)] for run in ("bare", "dummy"))
    ratio = median(ours / limit for ours, limit in zip(dummy, bare, strict=True))
    results["06_imagenet.py"] = f"{ratio:.2f} x the speed of the bare step"
    return results, machine, len(base)


def by_hardware(lines, render):
    """One block for each machine: what `render` makes of its lines, under a line that names it."""
    machines = {}
    for r in lines:
        machines.setdefault(hardware(r), []).append(r)
    return "\n\n".join(f"On {machine}:\n\n{render(some)}" for machine, some in machines.items())


def cifar10():
    """Our CIFAR-10 runs on one device beside the published one, epoch by epoch."""

    def block(runs):
        epochs = sorted({r["epoch"] for r in runs})
        theirs = published()["cifar10"]["runs"][0]["train_acc"]
        rows = [("train, published", *(f"{accuracy:.1f}" for accuracy in theirs))]
        for name, key in (("train, here", "train_acc"), ("test, here", "test_acc")):
            values = [[r[key] for r in runs if r["epoch"] == epoch] for epoch in epochs]
            rows.append((name, *(f"{mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values)))
        seeds = ", ".join(str(seed) for seed in sorted({r["seed"] for r in runs}))
        return f"{table(('accuracy in % after epoch', *epochs), rows)}\n\nHere: seeds {seeds}, mean (range)."

    return by_hardware(select(published_setting(), world_size=1), block)


def published_setting():
    """The records of the accuracy experiment on all of CIFAR-10, for as many epochs as were published."""
    runs = select(records("accuracy"), model="resnet18", limit=None, amp="none")
    runs = [r for r in runs if r["dataset"] == "cifar10" or r["data_dir"] == "data/cifar10"]
    whole = group(runs, "started", "command").values()
    return [r for run in whole if run[-1]["epoch"] == 5 for r in run]


def accuracy():
    """CIFAR-10 by number of processes: tools/experiments.py accuracy."""
    theirs = {run["world_size"]: run["train_acc"][-1] for run in published()["cifar10"]["runs"]}

    def block(runs):
        last = [run[-1] for run in group(runs, "started", "command").values()]
        rows = []
        for (batch, lr, warmup, n), some in sorted(
            group(last, "global_batch", "lr", "warmup_epochs", "world_size").items()
        ):
            as_published = some[0]["batch_size"] == 256 and not warmup
            beside = f"{theirs[n]:.1f}" if as_published and n in theirs else ""
            train, test = (f"{mean(r[key] for r in some):.1f}" for key in ("train_acc", "test_acc"))
            rate = f"{lr:g}" + (f", warmed up for {warmup:g} epoch{'s' * (warmup != 1)}" if warmup else "")
            rows.append((f"{n} x {some[0]['batch_size']} = {batch}", rate, train, beside, test, len(some)))
        head = ("processes x images = global batch", "rate", "train (%)", "published (%)", "test (%)", "seeds")
        return table(head, rows)

    return by_hardware(published_setting(), block)


def first_runs():
    """The last epoch of every run in results/first_runs."""

    def block(runs):
        last = {r["started"]: r for r in runs}
        rows = [
            (
                f"`{r['command'].partition(' --log')[0]}`",
                f"{r['test_acc']:.2f} %",
                f"{r['seconds']:.0f} s",
                f"{r['images_per_second']:.0f}",
                f"{100 * r['data_wait_share']:.1f} %",
                f"{r['peak_memory_mib']} MiB",
            )
            for r in last.values()
        ]
        return table(
            ("command", "test accuracy", "last epoch took", "images/s", "waiting for data", "peak memory"), rows
        )

    return by_hardware(records("first_runs"), block)


def input():
    """What feeding the network costs: the loops of tools/bench/input.py."""

    def block(runs):
        parts = []
        for command in dict.fromkeys(r["command"] for r in runs):
            loops = {}
            for r in (r for r in runs if r["command"] == command):
                loops.setdefault(r["loop"], []).append(r)
            rows = [_input_row(loop, some, loops) for loop, some in loops.items()]
            head = ("loop", "images/s, median (range)", "`01` (or our loader) against it", "peak memory")
            repeats = len(loops["01"])
            parts.append(f"`{command.partition(' --log')[0]}`, {repeats} runs of each:\n\n{table(head, rows)}")
        return "\n\n".join(parts)

    return by_hardware([r for r in records("input") if r["bench"] == "input"], block)


def _input_row(loop, some, loops):
    ours = loops["our loader" if "loader" in loop else "01"]
    speeds = [r["images_per_second"] for r in some]
    ratios = [a["images_per_second"] / b for a, b in zip(ours, speeds, strict=True)]
    memory = max(r.get("peak_memory_mib", 0) for r in some)
    name = f"{loop}, 1 worker" if "loader" in loop else loop
    return (
        name,
        spread(speeds, ".0f"),
        spread(ratios, ".2f") if some is not ours else "",
        f"{memory} MiB" if memory else "",
    )


def ddp():
    """What DistributedDataParallel costs and gives: tools/bench/ddp.py."""

    def block(runs):
        by_name = {}
        for r in runs:
            by_name.setdefault((r["world_size"], r["threads"], r["variant"]), []).append(r["images_per_second"])
        base = by_name[1, 1, "plain"]
        rows = []
        for (processes, threads, variant), speeds in by_name.items():
            quiet = by_name.get((processes, threads, "no_sync"))
            efficiency = [a / b / processes / threads for a, b in zip(speeds, base, strict=True)]
            exposed = [1 - a / b for a, b in zip(speeds, quiet, strict=True)] if quiet not in (None, speeds) else None
            rows.append((
                f"{processes} x {threads}", variant, spread(speeds, ".0f"), spread(efficiency, ".2f"),
                spread(exposed, ".2f") if exposed else "",
            ))  # fmt: skip
        head = ("processes x threads", "variant", "images/s, median (range)", "efficiency", "exposed communication")
        return f"`{runs[0]['command'].partition(' --log')[0]}`, {len(base)} runs of each:\n\n{table(head, rows)}"

    return by_hardware([r for r in records("ddp") if r["bench"] == "ddp"], block)


def launch():
    """Seconds from torchrun to the first step of 03, by number of processes: tools/bench/ddp.py."""

    def block(runs):
        times = {}
        for r in runs:
            times.setdefault(r["world_size"], []).append(r["seconds"])
        rows = [("seconds, median (range)", *(spread(some, ".1f") for some in times.values()))]
        return table(("processes", *times), rows)

    return by_hardware([r for r in records("ddp") if r["bench"] == "launch"], block)


def imagenet():
    """The last epoch of every run in results/imagenet."""

    def block(runs):
        last = {r["started"]: r for r in runs}
        first = {r["started"]: r for r in reversed(runs)}
        rows = [
            (
                f"`{_command(r)}`",
                f"{first[started]['train_loss']:.2f} -> {r['train_loss']:.2f}",
                f"{r['test_acc']:.2f} %, {r['test_top5']:.2f} %",
                f"{r['images_per_second']:.0f}",
                f"{100 * r['data_wait_share']:.1f} %, {100 * r['communication_share']:.1f} %",
            )
            for started, r in last.items()
        ]
        head = ("command", "train loss", "test top-1, top-5", "images/s", "waiting for data, for gradients")
        return table(head, rows)

    return by_hardware(records("imagenet"), block)


def _command(r):
    """The command of a record, without where it wrote."""
    return re.sub(r" --(log-file|checkpoints-path|tensorboard) \S+", "", r["command"])


def train():
    """What 06 costs beside the bare step: tools/bench/train.py."""

    def block(lines):
        parts = []
        for command in dict.fromkeys(r["command"] for r in lines):
            runs = {}
            for r in (r for r in lines if r["command"] == command):
                runs.setdefault(r["run"], []).append(r)
            rows = []
            for name, some in runs.items():
                base = runs["classic loader" if "loader" in name else "bare"]
                speeds = [r["images_per_second"] for r in some]
                ratios = [a / b["images_per_second"] for a, b in zip(speeds, base, strict=True)]
                memory = f"{max(r['peak_memory_mib'] for r in some)} MiB" if "peak_memory_mib" in some[0] else ""
                ratio = spread(ratios, ".3f") if some is not base else ""
                rows.append((name, spread(speeds, ".1f"), ratio, memory))
            head = ("run", "images/s, median (range)", "against the bare step (the classic loader)", "peak memory")
            parts.append(f"`{command.partition(' --log')[0]}`, {len(base)} runs of each:\n\n{table(head, rows)}")
            costs = [
                100 * checkpoint_cost(without["images_per_second"], saving["images_per_second"], saving)
                for without, saving in zip(runs["dummy"], runs["checkpoints"], strict=True)
            ]
            parts.append(f"A checkpoint every 100 steps costs {spread(costs, '.2f')} % of the time.")
        return "\n\n".join(parts)

    return by_hardware(records("train"), block)


def drill():
    """Make the table of the drills: the last run of each drill in tools/lab/drill.py."""
    from tools.lab.drill import DRILLS

    def block(lines):
        rows = []
        for r in {r["drill"]: r for r in lines}.values():
            what, world = DRILLS[r["drill"]].__doc__, f"{r['before']} -> {r['after']}"
            rows.append((f"`{r['drill']}`", what, r["steps_lost"], f"{r['seconds']:.1f} s", world))
        last = lines[-1]
        how = f"A checkpoint every {last['checkpoint_every']} steps, --timeout {last['timeout']}:"
        return f"{how}\n\n{table(('drill', 'what happens', 'steps lost', 'until the next step', 'processes'), rows)}"

    return by_hardware(records("drill"), block)


TABLES = {f.__name__: f for f in (ladder, cifar10, accuracy, first_runs, input, ddp, launch, imagenet, train, drill)}
