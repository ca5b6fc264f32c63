"""How 06 stops: signals to one rank or to all, before, during and after training."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from imagenet_runs import final, script
from processes import ROOT

from imagenet import loader, signals, votes
from imagenet.signals import EXIT_REQUEUE

Stopped = script.Stopped


def signalled(ranks, name, rank):
    """Send one rank a signal in the middle of training; returns the step after which the run said
    it has saved.
    """
    ranks.wait_for(r"== step: \[ *3/")
    ranks.signal(rank, name)
    assert set(ranks.wait()) == {EXIT_REQUEUE}, ranks.output()
    return int(
        re.search(
            r"stopped by a signal after step (\d+): saved, and --resume continues", ranks.output()
        )[1]
    )


def wait_briefly_for_torchrun(rank):
    """There is no torchrun whose signal could arrive."""
    signals.DELAY = 0.2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_makes_all_save_the_same_step(train, one_each, tmp_path, name):
    """A signal to one rank makes all save the same step and leave."""
    # a signal in an evaluation: see the test below
    options = [one_each, "--batch-size", 8, "--eval-every", 0]
    step = signalled(
        train("run", 2, *options, "--epochs", 1000, prepare=wait_briefly_for_torchrun), name, rank=1
    )
    assert final(tmp_path / "run")["step"] == step >= 3
    epochs = step // 5 + 1
    after = train("run", 2, *options, "--epochs", epochs, "--resume")
    assert after.wait() == [0, 0]
    assert f"step-{step:08}.pt, after step {step} of {5 * epochs}" in after.output()
    assert "resuming with other flags: --epochs 1000 -> " in after.output()
    assert after.output().count("== step: ") == 5 * epochs - step, "no step twice"


def send_a_signal_during_evaluation(rank):
    wait_briefly_for_torchrun(rank)

    def cast(self, original=votes.Votes.cast, **wishes):
        if "save" not in wishes and rank == 1:  # in an evaluation there is nothing to save
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, **wishes)

    votes.MAX_COST = 1000  # so that every step has a vote
    votes.Votes.cast = cast


def test_a_signal_during_an_evaluation_ends_it(train, one_each):
    """A signal during an evaluation ends it and the resumed run evaluates that epoch."""
    options = [one_each, "--batch-size", 20, "--epochs", 1]
    ranks = train("run", 2, *options, prepare=send_a_signal_during_evaluation)
    assert ranks.wait() == [EXIT_REQUEUE, EXIT_REQUEUE], ranks.output()
    assert (
        "stopped by a signal during an evaluation" in ranks.output()
        and "== test" not in ranks.output()
    )
    after = train("run", 2, *options, "--resume")
    assert after.wait() == [0, 0]
    assert "after step 2 of 2" in after.output() and "== step" not in after.output()
    assert after.output().count("== test: [1/1] | loss:") == 1


@pytest.mark.parametrize(
    ("only_evaluate", "again"), [(False, "--resume"), (True, "the same command")]
)
def test_a_stopped_evaluation_says_how_to_evaluate_again(only_evaluate, again):
    run = SimpleNamespace(
        args=SimpleNamespace(evaluate=only_evaluate),
        d=SimpleNamespace(device=torch.device("cpu")),
        ema=None,
        model=torch.nn.Identity(),
        share_buffers=lambda: None,
        autocast=contextlib.nullcontext,
        prepare=lambda images: images,
    )
    votes = SimpleNamespace(cast=lambda stop: None, count=lambda: (True, False))
    batch = torch.eye(3), torch.arange(3)
    with pytest.raises(Stopped, match=f"^during an evaluation: {again} evaluates again$"):
        script.evaluate(run, [batch], votes)


def test_a_signal_before_training_ends_the_process_at_once():
    with pytest.raises(SystemExit) as end:
        signals._note(signal.SIGTERM, None)
    assert end.value.code == EXIT_REQUEUE
    signals.stop.signal = None


def test_a_worker_whose_parent_has_just_died_asks_for_a_requeue(monkeypatch):
    """The kernel would kill it only if the parent died later."""
    codes = []
    parents = iter([50, 1])
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(signals.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    signals.exit_when_parent_dies()
    assert codes == [EXIT_REQUEUE]


def test_importing_06_leaves_the_signal_handlers_alone():
    """Importing 06 and its modules leaves the signal handlers alone."""
    assert {signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1)} == {signal.SIG_DFL}


def test_a_signal_while_torch_is_imported_asks_for_a_requeue(tmp_path):
    """A torch that takes long to import, here for ever."""
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    for name in ("SIGTERM", "SIGUSR1"):
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [
            sys.executable,
            "-c",
            "import runpy; runpy.run_path('06_imagenet.py', run_name='__main__')",
        ]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "importing\n"
        process.send_signal(getattr(signal, name))
        assert process.wait(300) == 75, "which launch/slurm/06_srun.sbatch looks for"


def test_loader_workers_leave_signals_to_the_process_that_trains(monkeypatch):
    """A signal to the whole group of processes must not end the workers before the save."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signals, "exit_when_parent_dies", lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    loader._ignore_signals(0)
    assert handlers == dict.fromkeys(
        (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), signal.SIG_IGN
    )


@pytest.mark.parametrize("started_by_torchrun", [True, False])
def test_a_rank_ends_with_its_torchrun_alone(monkeypatch, started_by_torchrun):
    """A shell that starts a rank may end before it, as nohup's does."""
    bound = []
    monkeypatch.setattr(signals, "exit_when_parent_dies", lambda: bound.append(True))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if started_by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    signals.exit_when_torchrun_dies()
    assert bound == [True] * started_by_torchrun


def test_a_worker_waits_for_the_signal_of_its_torchrun(monkeypatch):
    """A worker that stops for its torchrun waits for the signal."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        signals.stop.signal = "SIGTERM" if len(waits) == 3 else None

    monkeypatch.setattr(signals.time, "sleep", sleep)
    monkeypatch.setattr(signals, "ignore", lambda: None)
    monkeypatch.setattr(signals, "stop", signals.StopRequest())
    for launcher, expected in (("torchrun", 3), ("srun", 0)):
        waits.clear()
        with pytest.raises(SystemExit) as end:
            signals.exit_for_requeue(launcher)
        assert end.value.code == EXIT_REQUEUE and len(waits) == expected
