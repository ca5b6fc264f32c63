"""template/train.py, copied with setup_distributed.py into a folder of its own, as a user would."""

import functools
import importlib.util
import itertools
import math
import os
import re
import runpy
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import same
from processes import ROOT, finished, read_until, start_copy, without_gloo, workers
from ranks import Ranks
from torch.nn.functional import cross_entropy

FLAGS = ["--epochs", 3, "--batch-size", 500, "--lr", 0.1024, "--seed", 1]  # 0.2 for 500


def copy_template(folder):
    shutil.copy(ROOT / "template/train.py", folder)
    shutil.copy(ROOT / "common/setup_distributed.py", folder)
    return folder


@pytest.fixture
def project(tmp_path):
    return copy_template(tmp_path)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process printed, and its folder of checkpoints."""
    return learn(copy_template(tmp_path_factory.mktemp("one")), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same of two processes, which take each batch in five pieces and --lr as it is."""
    flags = ["--accumulate", 5, "--lr", 0.2, "--lr-scaling", "none"]
    return learn(copy_template(tmp_path_factory.mktemp("two")), 2, *flags)


def learn(folder, processes, *flags):
    codes, lines = fork(folder, processes, *FLAGS, *flags)
    assert codes == [0] * processes, lines
    return lines, folder / "checkpoints"


def work_in(folder, rank):
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # as Python does for a script in this folder


def fork(project, processes, *flags, prepare=work_in):
    """Run the project's train.py in forked processes; return their exit codes and rank 0's lines.

    As they do not import torch, that is quicker than a launcher.
    """
    ranks = start(project, processes, *flags, prepare=prepare)
    codes = ranks.wait()
    return codes, without_gloo(ranks.output()).splitlines()


def start(project, processes, *flags, prepare=work_in):
    prepare = functools.partial(prepare, project)
    return Ranks(project, processes, flags, script=str(project / "train.py"), prepare=prepare)


def losses(line):
    return [float(number) for number in re.findall(r"loss ([\d.]+)", line)]


def accuracies(line):
    return [float(number) for number in re.findall(r"accuracy ([\d.]+)%", line)]


def examples():
    """The inputs and the targets that the template draws."""
    inputs = torch.randn(12000, 20, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :5].argmax(1)


def plain_loop(clip=math.inf):
    """The lines that FLAGS give, as lists of numbers, and the momenta after the last step.

    Data and model are written out here; one batch holds what the processes share."""
    inputs, targets = examples()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    options = {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), 0.2, **options)
    step = itertools.count()

    def evaluate(first, last):
        with torch.no_grad():
            outputs = model(inputs[first:last])
            losses = cross_entropy(outputs, targets[first:last], reduction="none").tolist()
            right = (outputs.argmax(1) == targets[first:last]).tolist()
        return sum(losses) / len(losses), 100 * sum(right) / len(right)

    lines = []
    for epoch in range(3):
        order = torch.randperm(10000, generator=torch.Generator().manual_seed(1 + epoch))
        losses, right = [], []
        for batch in order.split(500):
            optimizer.param_groups[0]["lr"] = 0.2 * (1 + math.cos(math.pi * next(step) / 60)) / 2
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


def test_one_and_two_processes_train_as_a_plain_loop(one, two):
    lines, model, momenta = plain_loop()
    assert lines[-1][1] > 60, "of five classes; guessing is 20"
    for printed, checkpoints in (one, two):
        form = r"epoch 1/3: train loss [\d.]+, accuracy [\d.]+% \| validation loss"
        assert re.match(form, printed[0]) and printed[-1].startswith("done: test loss")
        for line, expected in zip(printed, lines, strict=True):
            assert losses(line) == pytest.approx(expected[0::2], abs=2e-4)
            # one example of 1000 may be on the edge
            assert accuracies(line) == pytest.approx(expected[1::2], abs=0.11)
        saved = torch.load(checkpoints / "last.pt")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-5)
        buffers = [saved["optimizer"]["state"][k]["momentum_buffer"] for k in range(4)]
        torch.testing.assert_close(buffers, momenta, rtol=1e-3, atol=1e-5)
        assert saved["epoch"] == 3 and saved["step"] == 0
        validated = [accuracies(line)[1] for line in printed[:3]]
        assert validated[2] == max(validated) == pytest.approx(100 * saved["best"])
        assert same(torch.load(checkpoints / "best.pt"), saved)


def test_it_prints_and_evaluates_as_often_as_it_is_told(project):
    flags = ["--epochs", 3, "--batch-size", 2000, "--print-every", 2, "--eval-every", 2]
    codes, lines = fork(project, 1, *flags)
    assert codes == [0]
    epochs = [line for line in lines if re.match(r"epoch \d/3: train loss \d", line)]
    validated = ["validation loss" in line for line in epochs]
    assert validated == [False, True, True], "the last epoch too"
    steps = re.findall(r"epoch (\d) \[(#*) *\] step (\d)/5: loss \d", "\n".join(lines))
    bars = [("#" * 8, "2"), ("#" * 16, "4")]
    assert steps == [(epoch, *bar) for epoch in "123" for bar in bars]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kept", [["last.pt"], ["best.pt"], ["last.pt", "best.pt"]])
def test_a_training_is_not_overwritten(project, two, kept):
    """Neither an interrupted one nor one that is complete. Rank 0 alone says so."""
    _, checkpoints = two
    os.mkdir(project / "checkpoints")
    for name in kept:
        shutil.copy(checkpoints / name, project / "checkpoints")
    before = files_in(project / "checkpoints")
    ranks = start(project, 2, *FLAGS)
    assert ranks.wait() == [2, 2]
    (line,) = without_gloo(ranks.output()).splitlines()
    assert line.startswith("train.py: --checkpoints checkpoints holds a training already")
    assert line.endswith("add --resume to continue it, or name another folder")
    assert without_gloo(ranks.output(1)) == ""
    assert files_in(project / "checkpoints") == before
    codes, lines = fork(project, 2, *FLAGS, "--resume")
    assert codes == [0, 0], lines
    assert lines[0] == f"resumed from checkpoints/{kept[0]}, after epoch 3 of 3"
    assert [line[:5] for line in lines[1:]] == ["done:"], "it only evaluates"
    after = files_in(project / "checkpoints")
    assert {name: after[name] for name in kept} == before, "a complete training stays as it is"


def test_a_training_goes_on_for_more_epochs(project, one):
    """And best.pt stays the best: here one that had answered everything."""
    lines, checkpoints = one
    shutil.copytree(checkpoints, project / "checkpoints")
    last, best = (project / "checkpoints" / name for name in ("last.pt", "best.pt"))
    torch.save(torch.load(last) | {"best": 1.0}, last)
    before = best.read_bytes()
    codes, more = fork(project, 1, *FLAGS, "--epochs", 5, "--resume")
    assert codes == [0]
    assert [line[:9] for line in more] == ["resumed f", "epoch 4/5", "epoch 5/5", "done: tes"]
    assert losses(more[2])[0] < losses(lines[2])[0], "it goes on to learn"
    assert best.read_bytes() == before and torch.load(last)["best"] == 1


def test_the_gradient_of_all_pieces_is_clipped_in_fp16_too(project):
    """There the scale of the loss must be taken off before.

    A norm of 0.3 clips some of the steps: to clip all would hide a gradient of the wrong size.
    """
    flags = ["--accumulate", 2, "--clip-grad", 0.3, "--amp", "fp16"]
    codes, printed = fork(project, 1, *FLAGS, *flags)
    assert codes == [0]
    lines, _, _ = plain_loop(clip=0.3)
    assert abs(lines[0][0] - plain_loop()[0][0][0]) > 0.02, "clipping matters"
    for line, expected in zip(printed, lines, strict=True):
        assert losses(line) == pytest.approx(expected[0::2], rel=5e-3)
    scaler = torch.load(project / "checkpoints/last.pt")["scaler"]
    assert scaler["_growth_tracker"] == 60, "steps, after which the scale of the loss may grow"


def with_everything_random(project):
    """Give the project a model with dropout and batch norm, and examples with augmentation.

    Its optimizer has two parameter groups, the second with the learning rate of the flag.
    The statistics of this batch norm are nearly those of the last batch, so that they differ from
    rank to rank. Of 997 test examples, one process has one more than the other.
    """
    text = (project / "train.py").read_text()
    for old, new in (
        ("nn.ReLU(), ", "nn.BatchNorm1d(64, momentum=0.9), nn.ReLU(), nn.Dropout(0.1), "),
        (
            "return self.data[index]",
            "return self.data[index][0] + torch.randn(20) / 9, self.data[index][1]",
        ),
        ("range(11000, 12000)", "range(11000, 11997)"),
        (
            "self.model.parameters(), lr, ",
            '[{"params": self.model[:1].parameters(), "lr": lr / 10},'
            ' {"params": self.model[1:].parameters()}], lr, ',
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (project / "train.py").write_text(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A project with everything random, and the lines of two processes that were not stopped."""
    project = copy_template(tmp_path_factory.mktemp("whole"))
    with_everything_random(project)
    codes, lines = hard(project, "whole", note_seeds_and_lrs)
    assert codes == [0, 0], lines
    return project, lines


def test_all_processes_evaluate_with_the_batch_norm_of_rank_0(whole):
    """Each trains on other examples. Rank 0 writes the file, which one process evaluates here."""
    project, lines = whole
    layers = [torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()]
    layers += [torch.nn.Dropout(), torch.nn.Linear(64, 5)]
    model = torch.nn.Sequential(*layers).eval()
    model.load_state_dict(torch.load(project / "whole/last.pt")["model"])
    inputs, targets = examples()
    for line, part in ((lines[2], slice(10000, 11000)), (lines[3], slice(11000, 11997))):
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            outputs = model(inputs[part]).float()
        loss = cross_entropy(outputs, targets[part]).item()
        right = (outputs.argmax(1) == targets[part]).sum().item()
        assert losses(line)[-1] == pytest.approx(loss, abs=5e-4)
        # one example may be on the edge
        assert accuracies(line)[-1] == pytest.approx(100 * right / len(outputs), abs=0.11)
    counted = accuracies(lines[3])[0] * 9.97
    assert abs(counted - round(counted)) < 0.06, "each example counts once"


def note_seeds_and_lrs(folder, rank):
    """Write into files of the rank: the seed of each dropout, and each step's learning rates."""
    work_in(folder, rank)

    def forward(self, inputs, original=torch.nn.Dropout.forward):
        if self.training:
            with open(f"seeds{rank}", "a") as file:
                print(torch.initial_seed(), file=file)
        return original(self, inputs)

    def step(self, *given, original=torch.optim.SGD.step):
        with open(f"lrs{rank}", "a") as file:
            print(*(group["lr"] for group in self.param_groups), file=file)
        return original(self, *given)

    torch.nn.Dropout.forward = forward
    torch.optim.SGD.step = step


def test_dropout_differs_in_every_piece_of_every_process(whole):
    project, _ = whole
    seeds = [line for rank in range(2) for line in (project / f"seeds{rank}").open()]
    assert len(seeds) == len(set(seeds)) == 2 * 3 * 20 * 2, "processes, epochs, steps, pieces"


def test_all_parameter_groups_follow_the_schedule(whole):
    """Each from its own learning rate. The tests of a resume below have the same two groups."""
    project, _ = whole
    expected = [0.4 * 500 / 256 * (1 + math.cos(math.pi * step / 60)) / 2 for step in range(60)]
    for rank in range(2):
        lines = (project / f"lrs{rank}").read_text().splitlines()
        first, second = zip(*(map(float, line.split()) for line in lines), strict=True)
        assert second == pytest.approx(expected)
        assert first == pytest.approx([lr / 10 for lr in expected])


def act_at_step(number, who, act, folder, rank):
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


def ask_to_stop():
    """Of both signals, each would end a process that does not expect it."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)


HARD = ["--epochs", 3, "--batch-size", 500, "--accumulate", 2, "--clip-grad", 1, "--amp", "fp16"]
HARD += ["--workers", 1, "--resume"]


def hard(project, name, prepare=work_in, minutes=0):
    """Train two processes with HARD, saved in the folder `name` after so many minutes."""
    flags = [*HARD, "--save-every", minutes, "--checkpoints", name]
    return fork(project, 2, *flags, prepare=prepare)


def test_a_killed_run_continues_with_the_same_bits(whole):
    """Killed in the middle of an epoch and of a save, and after signals to one process alone."""
    project, whole_lines = whole
    killed = -signal.SIGKILL
    # 6 steps, then 2, then 13: a signal ends the training after the step in which it arrives
    acts = [(7, 0, kill, killed), (3, 0, kill_in_the_next_save, killed), (13, 1, ask_to_stop, 75)]
    for number, who, act, expected in acts:
        prepare = functools.partial(act_at_step, number, who, act)
        minutes = 10 if act is ask_to_stop else 0  # so that the signals alone are a reason to save
        codes, lines = hard(project, "broken", prepare, minutes)
        assert codes[who] == expected and 0 not in codes, lines
    codes, lines = hard(project, "broken")
    assert codes == [0, 0], lines
    assert "resumed from broken/last.pt, after step 1 of epoch 2" in lines, lines
    assert lines[1:] == whole_lines[1 - len(lines) :], "the line of the broken epoch too"
    end, other = (torch.load(project / name / "last.pt") for name in ("whole", "broken"))
    assert end["epoch"] == 3 and same(end, other)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.rare)])
def test_torchrun_restarts_it_once_after_a_rank_is_killed(project, rank):
    """Though torchrun on one machine keeps its store: with the addresses of the killed rank, new
    processes would fail, which costs a second restart, or hang.
    """
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "train.py"]
    flags = ["--epochs=3", "--batch-size=50", "--print-every=1", "--save-every=0", "--resume"]
    process = start_copy(project, *launch, *flags)
    read_until(process, "epoch 2 ")
    workers(process.pid)[rank].kill()
    code, out, err = finished(process)
    assert code == 0, err
    assert re.search(r"^resumed from checkpoints/last.pt, after (step \d+ of )?epoch \d", out, re.M)
    assert out.count("resumed from") == 1 and "done: test loss" in out


@pytest.fixture
def template(monkeypatch):
    """The module, beside whose file setup_distributed.py seems to be."""
    monkeypatch.syspath_prepend(ROOT / "common")
    spec = importlib.util.spec_from_file_location("template", ROOT / "template/train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_epoch_and_example_has_an_augmentation_of_its_own(template):
    class Noise:
        def __getitem__(self, index):
            return torch.rand(1).item()

    keys = list(itertools.product(range(3), range(4)))
    drawn = [[template.Seeded(Noise(), seed)[key] for key in keys] for seed in (0, 1)]
    assert len(set(itertools.chain(*drawn))) == 2 * len(keys)
    assert drawn[0] == [template.Seeded(Noise(), 0)[key] for key in keys]


@pytest.fixture
def train_here(template, environment, monkeypatch):
    """A function (*flags) that trains in this process."""

    def train_here(*flags):
        environment()
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, flags)])
        template.main(template.parse_args())

    return train_here


SHORT = ["--epochs", 1, "--batch-size", 1000, "--checkpoints"]


def test_it_saves_after_so_many_minutes(template, train_here, monkeypatch, tmp_path):
    """And at the end. A step takes half a minute, and so does a save."""
    seconds = itertools.count(step=30)
    monkeypatch.setattr(template, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    saved = []

    def write(self, name, state):
        saved.append((state["epoch"], state["step"]))

    monkeypatch.setattr(template.Run, "write", write)
    train_here(*SHORT, tmp_path, "--save-every", 2, "--eval-every", 0)
    assert saved == [(0, 4), (0, 8), (1, 0)]


def test_an_epoch_is_resumed_with_its_order_and_may_change_to_fp16(
    template, train_here, tmp_path, capsys
):
    template.signals.append(signal.SIGTERM)
    with pytest.raises(SystemExit, match="75"):
        train_here(*SHORT, tmp_path)
    template.signals.clear()
    for flag, value, other in (("--batch-size", 1000, 500), ("--seed", 0, 1)):
        with pytest.raises(SystemExit, match="2"):
            train_here(*SHORT, tmp_path, "--resume", flag, other)
        assert f"another {flag}: finish it with {flag} {value}" in capsys.readouterr().err
    train_here(*SHORT, tmp_path, "--resume", "--amp", "fp16")
    assert torch.load(tmp_path / "last.pt")["epoch"] == 1


def work_apart(folder, rank):
    work_in(folder, rank)
    if rank == 1:
        os.mkdir("other")
        os.chdir("other")


def test_processes_that_do_not_share_a_folder_do_not_resume(project):
    (project / "checkpoints").mkdir()
    (project / "checkpoints/last.pt").touch()
    codes, lines = fork(project, 2, *FLAGS, "--resume", prepare=work_apart)
    message = "train.py: --checkpoints checkpoints is not one folder on all machines: name a"
    (line,) = lines
    assert codes == [2, 2] and line.startswith(message)


def test_without_a_test_set_it_trains_and_validates(
    template, train_here, monkeypatch, tmp_path, capsys
):
    train_set, val_set, _ = template.build_datasets()
    monkeypatch.setattr(template, "build_datasets", lambda: (train_set, val_set, None))
    train_here(*SHORT, tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"epoch 1/1: train loss \d.* \| validation loss \d", line)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_amp_computes_in_16_bits(template):
    model = torch.nn.Linear(20, 5)
    types = []
    model.register_forward_hook(lambda layer, inputs, outputs: types.append(outputs.dtype))
    inputs, targets = examples()
    d = SimpleNamespace(device=torch.device("cpu"))
    for amp in (None, "bf16", "fp16"):
        template.forward(model, (inputs[:8], targets[:8]), SimpleNamespace(amp=amp), d)
    assert types == [torch.float32, torch.bfloat16, torch.float16]


def test_sync_bn_has_the_layers_of_torch(template, train_here, monkeypatch):
    """torch refuses them on a CPU, if the template does not."""
    layers = [torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 5)]
    monkeypatch.setattr(template, "build_model", lambda args: torch.nn.Sequential(*layers))
    monkeypatch.setattr(template, "check", lambda *_: None)
    with pytest.raises(ValueError, match=r"SyncBatchNorm .* GPU"):
        train_here("--sync-bn")


# What the error says, and the flags.
MISTAKES = {
    # Two spellings that people and launchers use:
    "--batch-size 63: expected a multiple of 2, the processes times": (
        ["--batch_size", 63, "--accumulate", 2, "--local_rank=0"]
    ),
    "--batch-size 10001: expected at most the 10000 training": ["--batch-size", 10001],
    "--batch-size, --accumulate, --print-every: expected 1 or more": ["--accumulate", 0],
    "--sync-bn: torch's SyncBatchNorm needs GPUs, found none": ["--sync-bn"],
}


def test_flags_that_cannot_work_end_in_one_line(train_here, capfd):
    for message, flags in MISTAKES.items():
        with pytest.raises(SystemExit) as end:
            train_here(*flags)
        assert end.value.code == 2
        (line,) = without_gloo(capfd.readouterr().err).splitlines()
        assert line.startswith(f"train.py: {message}")


@pytest.mark.slow
def test_torchrun_ends_with_the_wrong_flag(project):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    code, _, err = finished(start_copy(project, *torchrun, "train.py", "--epoch-count=3"))
    *_, cause, end = err.splitlines()
    assert code == 1 and set(end) == {"="}, err
    assert cause.endswith("traceback : unrecognized arguments: --epoch-count=3")
    assert err.count("train.py: unrecognized") <= 1, "one rank prints it"


def test_it_starts_in_the_clone_too(tmp_path):
    process = start_copy(tmp_path, ROOT / "template/train.py", "--epochs=1", "--batch-size=1000")
    code, out, err = finished(process)
    assert code == 0 and "done: test loss" in out, err


def test_copied_alone_it_says_what_to_copy_too(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "setup_distributed", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(ROOT / "template/train.py", tmp_path)
    with pytest.raises(SystemExit, match=r"cp template/train\.py common/setup_dist"):
        runpy.run_path(str(tmp_path / "train.py"))
