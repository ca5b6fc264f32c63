"""How 06 stops: signals to one rank or to all, before, during and after training."""

import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from imagenet_runs import final
from processes import ROOT

from imagenet import checkpoint, loader, signals, votes
from imagenet.signals import EXIT_REQUEUE, ignore

IGNORED = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1), signal.SIG_IGN)


def wait_briefly_for_torchrun(rank):
    """There is no torchrun whose signal could arrive. And every step has a vote."""
    signals.DELAY = 0.2
    votes.MAX_COST = 1000


def save_to_a_slow_disk(rank):
    """The first checkpoint is complete only after training has begun to wait for it."""
    wait_briefly_for_torchrun(rank)
    awaited = threading.Event()

    def init(self, *given, original=checkpoint.Checkpoints.__init__):
        original(self, *given)
        self.patience = 0.1

    def write(*given, original=checkpoint.write_file):
        awaited.wait(60)
        original(*given)

    def wait_for_all(self, original=checkpoint.Checkpoints._wait_for_all):
        awaited.set()
        return original(self)

    checkpoint.Checkpoints.__init__ = init
    checkpoint.Checkpoints._wait_for_all = wait_for_all
    checkpoint.write_file = write


def test_a_signal_to_one_rank_makes_all_save_the_same_step(train, one_each, tmp_path):
    """Although the disk is still busy with the checkpoint of the first epoch."""
    options = [one_each, "--batch-size", 4, "--eval-every", 0]
    ranks = train("run", 2, *options, "--epochs", 1000, prepare=save_to_a_slow_disk)
    ranks.wait_for(r"== step: \[ *1/10\] \[2/")
    ranks.signal(1, "SIGUSR1")
    assert set(ranks.wait()) == {EXIT_REQUEUE}, ranks.output()
    stopped = r"stopped by a signal after step (\d+): saved, and --resume continues"
    step = int(re.search(stopped, ranks.output())[1])
    assert final(tmp_path / "run")["step"] == step > 10
    epochs = step // 10 + 1
    after = train("run", 2, *options, "--epochs", epochs, "--resume")
    assert after.wait() == [0, 0]
    assert f"step-{step:08}.pt, after step {step} of {10 * epochs}" in after.output()
    assert "resuming with other flags: --epochs 1000 -> " in after.output()
    assert after.output().count("== step: ") == 10 * epochs - step, "no step twice"


def send_a_signal_during_evaluation(rank):
    wait_briefly_for_torchrun(rank)

    def cast(self, original=votes.Votes.cast, **wishes):
        if "save" not in wishes and rank == 1:  # in an evaluation there is nothing to save
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, **wishes)

    votes.Votes.cast = cast


def test_a_signal_during_an_evaluation_ends_it(train, one_each):
    """And the resumed run evaluates that epoch."""
    options = [one_each, "--batch-size", 20, "--epochs", 1]
    ranks = train("run", 2, *options, prepare=send_a_signal_during_evaluation)
    assert ranks.wait() == [EXIT_REQUEUE, EXIT_REQUEUE], ranks.output()
    stopped = "stopped by a signal during an evaluation: --resume evaluates again"
    assert stopped in ranks.output() and "== test" not in ranks.output()
    after = train("run", 2, *options, "--resume")
    assert after.wait() == [0, 0]
    assert "after step 2 of 2" in after.output() and "== step" not in after.output()
    assert after.output().count("== test: [1/1] | loss:") == 1


def test_a_stopped_evaluate_alone_says_how_to_evaluate_again(run_06):
    assert run_06().code == 0
    signals.stop.signal = "SIGTERM"
    end = run_06("--evaluate", "--resume")
    assert end.code == EXIT_REQUEUE
    assert "stopped by a signal during an evaluation: the same command evaluates again" in end.out


def test_a_worker_whose_parent_has_just_died_asks_for_a_requeue(monkeypatch):
    """The kernel would kill it only if the parent died later."""
    codes = []
    parents = iter([50, 1])
    monkeypatch.setattr(signals.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(signals.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    signals.exit_when_parent_dies()
    assert codes == [EXIT_REQUEUE]


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
    assert handlers == IGNORED | {signal.SIGINT: signal.SIG_IGN}


def test_a_rank_ends_with_its_torchrun_alone(run_06, monkeypatch):
    """A shell that starts a rank may end before it, as nohup's does.

    And it ignores signals at its end: when Python exits, it restores the default handlers, which
    would make a failure of a complete training.
    """
    bound = []
    monkeypatch.setattr(signals, "exit_when_parent_dies", lambda: bound.append(True))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    signals.exit_when_torchrun_dies()
    assert not bound
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signals, "ignore", ignore)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_06().code == 0
    assert bound == [True] and handlers == IGNORED


def test_a_worker_waits_for_the_signal_of_its_torchrun(monkeypatch):
    """And ignores later ones."""
    waits = []
    handlers = {}

    def sleep(seconds):
        waits.append(seconds)
        signals.stop.signal = "SIGTERM" if len(waits) == 3 else None

    monkeypatch.setattr(signals.time, "sleep", sleep)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signals, "stop", signals.StopRequest())
    for launcher, expected in (("torchrun", 3), ("srun", 0)):
        waits.clear()
        handlers.clear()
        with pytest.raises(SystemExit) as end:
            signals.exit_for_requeue(launcher)
        assert end.value.code == EXIT_REQUEUE and len(waits) == expected
        assert handlers == IGNORED
