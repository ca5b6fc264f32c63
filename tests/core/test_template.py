"""template/train.py, copied with distributed.py into a folder of its own, as a user would."""

import ast
import functools
import importlib.util
import io
import itertools
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, without_gloo
from ranks import Ranks
from torch.nn.functional import cross_entropy

from tools.lab.slurm_cluster import wait_until

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]


def copy_template(folder):
    shutil.copy(ROOT / "template/train.py", folder)
    shutil.copy(ROOT / "common/distributed.py", folder)
    return folder


@pytest.fixture
def project(tmp_path):
    return copy_template(tmp_path)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process printed, and its folder of checkpoints."""
    folder = copy_template(tmp_path_factory.mktemp("one"))
    return run(folder, sys.executable, *FLAGS, "--checkpoints", "one"), folder / "one"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same of two processes."""
    folder = copy_template(tmp_path_factory.mktemp("two"))
    return run(folder, *TORCHRUN, *FLAGS, "--checkpoints", "two"), folder / "two"


def run(project, *command):
    """Run a command in the folder of the project; returns the lines of rank 0."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    end = subprocess.run(
        list(map(str, command)), cwd=project, env=env, capture_output=True, text=True
    )
    assert end.returncode == 0, end.stderr
    return without_gloo(end.stdout).splitlines()


def work_in(folder, rank):
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as Python does for a script in this folder


def fork(project, processes, script, *flags):
    """Run a script of the project in forked processes; returns their exit codes and rank 0's lines.

    As they do not import torch, that is quicker than run().
    """
    prepare = functools.partial(work_in, project)
    ranks = Ranks(project, processes, flags, script=str(project / script), prepare=prepare)
    codes = ranks.wait()
    return codes, without_gloo(ranks.output()).splitlines()


def numbers(lines):
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


FLAGS = ["train.py", "--epochs", 3, "--batch-size", 500]


def test_two_processes_train_the_same_as_one(project, one, two):
    """Two processes train the same as one which goes on for more epochs."""
    (one, checkpoints), (two, checkpoints_of_two) = one, two
    assert len(one) == 4 and re.match(
        r"epoch 1/3: train loss [\d.]+, accuracy [\d.]+% \| validation loss", one[0]
    )
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-2)
    accuracy = float(re.search(r"done: test loss [\d.]+, accuracy ([\d.]+)%", one[-1])[1])
    assert accuracy > 60, "of five classes; guessing is 20"
    whole = torch.load(checkpoints_of_two / "last.pt")
    validated = [
        float(re.search(r"validation loss [\d.]+, accuracy ([\d.]+)%", line)[1]) for line in two[:3]
    ]
    assert (
        100 * whole["best"] == pytest.approx(max(validated))
        and (checkpoints_of_two / "best.pt").exists()
    )

    shutil.copytree(checkpoints, project / "one")
    codes, more = fork(project, 1, *FLAGS, "--epochs", 5, "--checkpoints", "one", "--resume")
    assert codes == [0]
    assert [line[:9] for line in more] == ["resumed f", "epoch 4/5", "epoch 5/5", "done: tes"]
    before = float(re.search(r"train loss ([\d.]+)", one[2])[1])
    assert float(re.search(r"train loss ([\d.]+)", more[2])[1]) < before, "it goes on to learn"


def test_fp16_learns_the_same_and_keeps_its_scale_at_a_resume(project, one):
    flags = [*FLAGS, "--amp", "fp16"]
    printed = []
    scalers = []
    for more in ([], ["--epochs", 4, "--resume"]):
        codes, lines = fork(project, 2, *flags, *more)
        assert codes == [0, 0], lines
        printed.append(lines)
        scalers.append(torch.load(project / "checkpoints/last.pt")["scaler"])
    assert numbers(printed[0]) == pytest.approx(numbers(one[0]), rel=2e-2)
    assert [scaler["_growth_tracker"] for scaler in scalers] == [60, 80], "steps"


def plain_loop(clip=math.inf):
    """The lines that FLAGS give, as lists of numbers, and the momenta after the last step.

    Data and model are written out here; one batch holds what the processes share."""
    inputs = torch.randn(12000, 20, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :5].argmax(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    step = itertools.count()

    def evaluate(first, last):
        with torch.no_grad():
            outputs = model(inputs[first:last])
            losses = cross_entropy(outputs, targets[first:last], reduction="none").tolist()
            right = (outputs.argmax(1) == targets[first:last]).tolist()
        return sum(losses) / len(losses), 100 * sum(right) / len(right)

    lines = []
    for epoch in range(3):
        order = torch.randperm(10000, generator=torch.Generator().manual_seed(epoch))
        losses, right = [], []
        for batch in order.split(500):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * next(step) / 60)) / 2
            outputs = model(inputs[batch])
            loss = cross_entropy(outputs, targets[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses += cross_entropy(outputs, targets[batch], reduction="none").tolist()
            right += (outputs.argmax(1) == targets[batch]).tolist()
        trained = sum(losses) / len(losses), 100 * sum(right) / len(right)
        lines.append([*trained, *evaluate(10000, 11000)])
    lines.append(evaluate(11000, 12000))
    return lines, model, [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]


@pytest.mark.parametrize("processes", ["one", "two"])
def test_losses_and_accuracies_are_those_of_a_plain_loop(processes, request):
    printed, checkpoints = request.getfixturevalue(processes)
    lines, model, momenta = plain_loop()
    for line, expected in zip(printed, lines, strict=True):
        losses = [float(number) for number in re.findall(r"loss ([\d.]+)", line)]
        accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)%", line)]
        assert losses == pytest.approx(expected[0::2], abs=2e-4)
        assert accuracies == pytest.approx(expected[1::2], abs=0.11), (
            "one example of 1000 may be on the edge"
        )
    saved = torch.load(checkpoints / "last.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-5)
    buffers = [saved["optimizer"]["state"][k]["momentum_buffer"] for k in range(4)]
    torch.testing.assert_close(buffers, momenta, rtol=1e-3, atol=1e-5)
    assert saved["epoch"] == 3 and saved["step"] == 0
    assert saved["best"] == pytest.approx(max(line[3] for line in lines[:3]) / 100, abs=0.0011)


def test_the_gradient_of_all_pieces_is_clipped(project):
    """In fp16 too, where the scale of the loss must be taken off before.

    A norm of 0.3 clips some of the steps: to clip all would hide a gradient of the wrong size.
    """
    flags = ["--accumulate", 2, "--clip-grad", 0.3, "--amp", "fp16"]
    codes, printed = fork(project, 1, *FLAGS, *flags)
    assert codes == [0]
    lines, _, _ = plain_loop(clip=0.3)
    assert abs(lines[0][0] - plain_loop()[0][0][0]) > 0.02, "clipping matters"
    for line, expected in zip(printed, lines, strict=True):
        losses = [float(number) for number in re.findall(r"loss ([\d.]+)", line)]
        assert losses == pytest.approx(expected[0::2], rel=5e-3)


def with_everything_random(project):
    """Give the project a model with dropout and batch norm, and examples with augmentation."""
    text = (project / "train.py").read_text()
    for old, new in (
        ("nn.ReLU(), ", "nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), "),
        (
            "return self.data[index]",
            "return self.data[index][0] + torch.randn(20) / 9, self.data[index][1]",
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (project / "train.py").write_text(text)


def act_at_step(folder, number, who, act, rank):
    """Let a rank call act() in one of the steps that it makes, before it changes the weights."""
    work_in(folder, rank)
    steps = itertools.count(1)

    def step(self, *given, original=torch.optim.SGD.step):
        if rank == who and next(steps) == number:
            act()
        return original(self, *given)

    torch.optim.SGD.step = step


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_next_save():
    """Between the file and its name."""
    os.replace = lambda *paths: kill()


def ask(name):
    os.kill(os.getpid(), getattr(signal, name))


HARD = ["--epochs", 3, "--batch-size", 500, "--accumulate", 2, "--clip-grad", 1, "--amp", "fp16"]
HARD += ["--workers", 1, "--save-every", 0, "--resume"]


def hard(project, name, processes, *act):
    """Train with HARD in the folder `name`; act: as act_at_step has it. Return codes and lines."""
    prepare = functools.partial(act_at_step, project, *act) if act else None
    flags = [*HARD, "--checkpoints", name]
    prepare = prepare or functools.partial(work_in, project)
    script = str(project / "train.py")
    ranks = Ranks(project, processes, flags, script=script, prepare=prepare)
    return ranks.wait(), without_gloo(ranks.output()).splitlines()


def same_bits(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


def check_that_it_ends_with_the_same_bits(project, processes, acts):
    """Train without a break, then with one act after another, each with the code that it gives."""
    with_everything_random(project)
    codes, whole_lines = hard(project, "whole", processes)
    assert codes == [0] * processes, whole_lines
    for number, who, act, expected in acts:
        codes, lines = hard(project, "broken", processes, number, who, act)
        assert codes[who] == expected, lines
        assert 0 not in codes, lines
    codes, lines = hard(project, "broken", processes)
    assert codes == [0] * processes, lines
    assert lines[0].startswith("resumed from")
    assert lines[1:] == whole_lines[1 - len(lines) :], "the line of the broken epoch too"
    whole, broken = (torch.load(project / name / "last.pt") for name in ("whole", "broken"))
    assert whole["epoch"] == 3 and same_bits(whole, broken)
    return lines


def test_a_killed_run_continues_with_the_same_bits(project):
    """Killed in the middle of an epoch, and after a signal to one process alone."""
    acts = [(7, 0, kill, -signal.SIGKILL), (15, 1, functools.partial(ask, "SIGUSR1"), 75)]
    lines = check_that_it_ends_with_the_same_bits(project, 2, acts)
    # 6 steps, then 15: a signal ends the training after the step in which it arrives
    assert "resumed from broken/last.pt, after step 1 of epoch 2" in lines, lines


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ten_kills_and_signals_at_any_step_leave_the_same_bits(project, processes):
    draw = random.Random(processes)
    kinds = [(kill, -9), (kill_in_the_next_save, -9), (functools.partial(ask, "SIGTERM"), 75)]
    acts = []
    for k in range(10):
        act, code = kinds[k % 3]
        who = 0 if act is kill_in_the_next_save else draw.randrange(processes)
        acts.append((draw.randint(1, 6), who, act, code))
    check_that_it_ends_with_the_same_bits(project, processes, acts)


@pytest.mark.slow
def test_augmentation_and_accumulation_are_the_same_on_any_number_of_processes(project):
    """Each example has a random number of its own in each epoch."""
    with_everything_random(project)
    text = (project / "train.py").read_text()
    plain = text.replace("nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), ", "nn.ReLU(), ")
    (project / "train.py").write_text(plain)
    given = [*FLAGS, "--epochs", 2]
    _, one = fork(project, 1, *given)
    _, two = fork(project, 2, *given, "--accumulate", 5, "--workers", 2)
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-3)


@pytest.mark.slow
def test_every_example_counts_once_on_three_processes(project):
    text = (project / "train.py").read_text()
    assert text.count("range(11000, 12000)") == 1
    (project / "train.py").write_text(text.replace("range(11000, 12000)", "range(11000, 11997)"))
    flags = ["train.py", "--epochs", 1, "--batch-size", 600]
    one = run(project, sys.executable, *flags)
    assert torch.load(project / "checkpoints/last.pt")["epoch"] == 1, "the last epoch is saved"
    three = run(project, *TORCHRUN[:-1], "--nproc-per-node=3", *flags)
    for lines in (one, three):  # an accuracy of 997 examples is a whole number of 997ths
        count = float(lines[-1].split()[-1].rstrip("%")) * 9.97
        assert abs(count - round(count)) < 0.06
    assert numbers(three) == pytest.approx(numbers(one), rel=2e-2)


def kill_in_the_second_save_of_last_pt(rank):
    """As in a real save, half of the bytes are in the file then."""
    sys.path.append(str(ROOT / "common"))  # for the template's distributed.py
    original = torch.save
    saves = []

    def save(state, path):
        saves.append("last.pt" in path)
        if sum(saves) < 2:
            original(state, path)
            return
        whole = io.BytesIO()
        original(state, whole)
        with open(path, "wb") as file:
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


def test_a_kill_while_last_pt_is_saved_leaves_the_one_before(tmp_path):
    given = ["--epochs", 3, "--batch-size", 5000, "--checkpoints", tmp_path / "saved"]
    given += ["--save-every", 0, "--print-every", 1]
    prepare = kill_in_the_second_save_of_last_pt
    ranks = Ranks(tmp_path, 1, given, prepare=prepare, script="template/train.py")
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    assert "epoch 1 [####################] step 2/2: loss" in ranks.output()
    saved = torch.load(tmp_path / "saved/last.pt")
    assert (saved["epoch"], saved["step"]) == (0, 1)


@pytest.fixture
def template(monkeypatch):
    """The module, beside whose file distributed.py seems to be."""
    monkeypatch.syspath_prepend(ROOT / "common")
    spec = importlib.util.spec_from_file_location("template", ROOT / "template/train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def share(template, rank, world_size, epoch=0, first_step=0, examples=100, accumulate=1):
    """The numbers of the examples of a rank, piece by piece, in batches of 12."""
    args = SimpleNamespace(batch_size=12, accumulate=accumulate, seed=0)
    place = SimpleNamespace(rank=rank, world_size=world_size)
    pieces = list(template.own_pieces(args, place, examples, epoch, first_step))
    assert {key for piece in pieces for key, _ in piece} == {epoch}
    return [[index for _, index in piece] for piece in pieces]


def test_every_epoch_has_an_order_of_its_own(template):
    batches = share(template, 0, 1)
    assert [len(batch) for batch in batches] == [12] * 8, "of 100 examples, 4 are left out"
    assert len(set(itertools.chain(*batches))) == 96
    assert batches != share(template, 0, 1, epoch=1)
    assert batches[3:] == share(template, 0, 1, first_step=3), "the rest is the same"


def test_processes_and_pieces_share_a_batch(template):
    shares = [share(template, rank, 2, accumulate=3) for rank in range(2)]
    assert {len(piece) for pieces in shares for piece in pieces} == {2}
    for step, batch in enumerate(share(template, 0, 1)):
        pieces = [piece for rank in range(2) for piece in shares[rank][3 * step : 3 * step + 3]]
        assert sorted(itertools.chain(*pieces)) == sorted(batch)


def test_each_epoch_and_example_has_an_augmentation_of_its_own(template):
    class Noise:
        def __getitem__(self, index):
            return torch.rand(1).item()

    keys = list(itertools.product(range(3), range(4)))
    drawn = [[template.Seeded(Noise(), seed)[key] for key in keys] for seed in (0, 1)]
    assert len(set(itertools.chain(*drawn))) == 2 * len(keys)
    assert drawn[0] == [template.Seeded(Noise(), 0)[key] for key in keys]


@pytest.mark.parametrize(
    ("processes", "flags", "message"),
    [
        (2, ["--batch-size", 63], "--batch-size 63: expected a multiple of 2, the processes times"),
        (1, ["--batch-size", 10001], "--batch-size 10001: expected at most the 10000 training"),
        (1, ["--accumulate", 0], "--batch-size, --accumulate, --print-every: expected 1 or more"),
        (1, ["--sync-bn"], "--sync-bn: torch's SyncBatchNorm needs GPUs, found none"),
    ],
)
def test_flags_that_cannot_work_end_in_one_line(project, processes, flags, message):
    codes, lines = fork(project, processes, "train.py", *flags)
    assert codes == [2] * processes
    assert lines[-1].startswith(f"train.py: {message}") and "Traceback" not in "".join(lines)


def test_without_distributed_py_it_says_what_to_copy():
    end = subprocess.run(
        [sys.executable, ROOT / "template/train.py"], capture_output=True, text=True
    )
    expected = (
        "no distributed.py beside train.py: cp template/train.py common/distributed.py FOLDER\n"
    )
    assert (end.returncode, end.stdout, end.stderr) == (1, "", expected)


def test_it_has_at_most_220_lines_of_code():
    text = (ROOT / "template/train.py").read_text()
    tree = ast.parse(text)
    documented = [
        n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    no_code = set()
    for node in documented:
        if ast.get_docstring(node):
            no_code |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    assert sum(bool(line) and line[0] != "#" and k not in no_code for k, line in lines) <= 220


@pytest.mark.slow
def test_a_slurm_job_that_is_asked_to_save_continues_with_the_same_bits(project, slurm):
    """With the batch file of 06, in which the template takes the place of 06."""
    text = (ROOT / "launch/slurm/06_srun.sbatch").read_text()
    assert text.count(" python 06_imagenet.py ") == 1
    job_file = project / "train.sbatch"
    job_file.write_text(text.replace("python 06_imagenet.py", f"python {project / 'train.py'}"))
    flags = ["--epochs", 60, "--batch-size", 500, "--print-every", 10]
    job = slurm.sbatch(
        job_file,
        *flags,
        "--checkpoints",
        project / "broken",
        options=["--ntasks-per-node=1", "--cpus-per-task=1"],
    )
    assert wait_until(lambda: " step 10/20" in slurm.output(job), 120), slurm.output(job)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert wait_until(lambda: "as a signal asked" in slurm.output(job), 60), slurm.output(job)
    slurm.restart(job)
    assert slurm.wait(job) == ("COMPLETED", 0), slurm.output(job)
    output = slurm.output(job)
    asked = re.findall(r"saved after step (\d+) of epoch (\d+), as a signal asked", output)
    resumed = re.findall(r"resumed from \S+, after step (\d+) of epoch (\d+)", output)
    assert len(asked) == 1 and resumed == asked, output
    assert slurm.show(job)["Restarts"] == "1"
    codes, _ = fork(project, 2, "train.py", *flags, "--checkpoints", "whole")
    assert codes == [0, 0]
    whole, broken = (torch.load(project / name / "last.pt") for name in ("whole", "broken"))
    assert same_bits(whole, broken)


@pytest.mark.slow
def test_the_template_runs_under_srun_and_the_old_launcher(project, slurm):
    end = slurm.run(
        "srun",
        "--nodes=2",
        "--ntasks=4",
        "--kill-on-bad-exit=1",
        "python",
        project / ("train.py"),
        "--epochs",
        "1",
        "--checkpoints",
        project / "srun",
    )
    assert end.returncode == 0 and end.stdout.count("done: test loss") == 1, end.stderr
    lines = run(
        project,
        sys.executable,
        "-m",
        "torch.distributed.launch",
        "--nproc-per-node=2",
        "train.py",
        "--epochs",
        1,
    )
    assert lines[-1].startswith("done: test loss")
