"""template/train.py, copied with distributed.py into a folder of its own, as a user would."""

import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from processes import ROOT, without_gloo
from ranks import Ranks
from torch.nn.functional import cross_entropy

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


@pytest.mark.flags("template/train.py", "--resume", "--checkpoints", "--epochs")
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
    assert [line[:9] for line in more] == ["epoch 4/5", "epoch 5/5", "done: tes"]
    before = float(re.search(r"train loss ([\d.]+)", one[2])[1])
    assert float(re.search(r"train loss ([\d.]+)", more[1])[1]) < before, "it goes on to learn"


@pytest.mark.flags("template/train.py", "--amp")
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


def plain_loop():
    """The lines that FLAGS give, as lists of numbers, and the momenta after the last step.

    Data and model are written out here; one batch holds what the processes share."""
    inputs = torch.randn(12000, 20, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :5].argmax(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)

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
            outputs = model(inputs[batch])
            loss = cross_entropy(outputs, targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += cross_entropy(outputs, targets[batch], reduction="none").tolist()
            right += (outputs.argmax(1) == targets[batch]).tolist()
        scheduler.step()
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
    assert saved["epoch"] == 3 and saved["optimizer"]["param_groups"][0]["lr"] == 0
    assert saved["best"] == pytest.approx(max(line[3] for line in lines[:3]) / 100, abs=0.0011)


@pytest.mark.flags("template/train.py", "--resume")
def test_a_killed_run_continues_with_the_same_bits(project):
    """With dropout, which needs the same random numbers too."""
    text = (project / "train.py").read_text()
    assert text.count("nn.ReLU(), ") == 1
    text = text.replace("nn.ReLU(), ", "nn.ReLU(), nn.Dropout(0.1), ")
    (project / "train.py").write_text(text)
    codes, _ = fork(project, 2, *FLAGS, "--checkpoints", "whole")
    assert codes == [0, 0]
    saved = "            save(last_pt, state, d)\n"
    assert text.count(saved) == 1
    kill = f"{saved}            d.is_main and os.kill(os.getpid(), 9)\n"
    (project / "killed.py").write_text(text.replace(saved, kill))
    codes, _ = fork(project, 2, "killed.py", *FLAGS[1:], "--checkpoints", "killed")
    assert codes[0] == -signal.SIGKILL and codes[1] != 0
    assert torch.load(project / "killed/last.pt")["epoch"] == 1
    codes, _ = fork(project, 2, *FLAGS, "--checkpoints", "killed", "--resume")
    assert codes == [0, 0]
    whole, killed = (torch.load(project / name / "last.pt") for name in ("whole", "killed"))
    assert whole["epoch"] == killed["epoch"] == 3 and whole["best"] == killed["best"]
    assert all(torch.equal(value, killed["model"][name]) for name, value in whole["model"].items())
    momenta = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (whole, killed)]
    assert torch.equal(*momenta)


@pytest.mark.slow
def test_every_example_counts_once_on_three_processes(project):
    text = (project / "train.py").read_text()
    assert text.count("range(11000, 12000)") == 1
    (project / "train.py").write_text(text.replace("range(11000, 12000)", "range(11000, 11997)"))
    flags = ["train.py", "--epochs", 1, "--batch-size", 600, "--save-every", 5]
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
    prepare = kill_in_the_second_save_of_last_pt
    ranks = Ranks(tmp_path, 1, given, prepare=prepare, script="template/train.py")
    assert ranks.wait() == [-signal.SIGKILL], ranks.output()
    assert "epoch 2/3" in ranks.output()
    assert torch.load(tmp_path / "saved/last.pt")["epoch"] == 1


def test_every_epoch_has_an_order_of_its_own(project):
    text = (project / "train.py").read_text()
    call = "        loss, accuracy = run_epoch(ddp, "
    assert text.count(call) == 1
    (project / "train.py").write_text(
        text.replace(call, f"        print('order', list(sampler)[:5])\n{call}")
    )
    _, lines = fork(project, 1, "train.py", "--epochs", 2, "--batch-size", 5000)
    orders = [line for line in lines if line.startswith("order")]
    assert len(orders) == len(set(orders)) == 2


def test_a_batch_that_the_processes_cannot_share_is_named(project):
    codes, lines = fork(project, 2, "train.py", "--batch-size", 63)
    assert codes == [1, 1]
    message = "--batch-size 63: expected a multiple of the 2 processes"
    assert lines[-1] == f"ValueError: {message}"


def test_a_batch_larger_than_the_training_set_is_named(project):
    codes, lines = fork(project, 1, "train.py", "--batch-size", 10001)
    assert codes == [1]
    message = "--batch-size 10001: expected at most the 10000 training examples"
    assert lines[-1] == f"ValueError: {message}"


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
