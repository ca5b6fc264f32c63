"""What a console shows beside its lines, and when a clock is read. Numbers: test_numbers.py."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from rungs import flags

from common import report as report_module
from common.console import memory_used
from common.records import append_record, count_repeats
from common.report import Report, warmup_steps
from ddp.report import host_lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told to."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: clock.now)
    return clock


def train_epoch(report, clock, steps):
    """Go through an epoch of steps of 10 images and a tenth of a second each."""
    batches = [(None, torch.zeros(10))] * steps
    for step, _ in enumerate(report.timed(batches, epoch=0)):
        clock.now += 0.1
        if report.due(step):
            report.show_step(step, torch.tensor([20.0, 5.0, 10.0]))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_progress_bar_and_a_file_and_other_ranks_do_not(clock, monkeypatch):
    """The first rank alone prints lines, and beside them, in a terminal, a bar."""
    for output, rank in ((Terminal(), 0), (io.StringIO(), 0), (Terminal(), 1)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            device = torch.device("cpu")
            report = Report(flags("--print-every", 2), device, is_main=rank == 0)
            train_epoch(report, clock, steps=5)
        text = output.getvalue()
        lines = re.findall(r"== step: \[ +(\d)/5\].* img/s\n", text)
        assert lines == ([] if rank else ["2", "4", "5"])
        has_bar = output.isatty() and rank == 0
        assert ("epoch 1/5:" in text and "loss 2.000, 100 img/s" in text) == has_bar
        assert ("\r" in text) == has_bar == ("/5 [" in text), "of five steps"
        assert text == "" or rank == 0


def test_a_terminal_shows_a_bar_in_an_evaluation_of_more_than_two_seconds(clock, monkeypatch):
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    report = Report(flags(), torch.device("cpu"))
    for seconds in (0.1, 1):
        monkeypatch.setattr(sys, "stdout", Terminal())
        for _ in report.with_bar(range(5)):
            clock.now += seconds
        assert ("test:" in sys.stdout.getvalue()) == (seconds == 1)


def test_the_device_is_synchronised_before_the_clock_is_read(clock, monkeypatch):
    reads = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: reads.append(clock.now))
    report = Report(flags(), torch.device("cpu"))
    report.device = torch.device("cuda")
    train_epoch(report, clock, steps=20)
    moments = {round(moment - 100, 1) for moment in reads}
    assert moments == {0, 0.2, 2}, "at the beginning, the end of the first steps, and the end"


def test_the_first_steps_that_a_speed_leaves_out_are_a_tenth_and_five_at_most():
    assert [warmup_steps(steps) for steps in (3, 11, 49, 60, 1000)] == [0, 1, 4, 5, 5]


def test_the_repeats_of_a_command_are_counted(tmp_path):
    log = tmp_path / "log"
    assert count_repeats(log, "train") == 0
    for started in "112":  # a record per epoch; two runs
        append_record(log, {"command": "train", "started": started})
    append_record(log, {"command": "another", "started": "3"})
    assert count_repeats(log, "train") == 2


def test_every_host_has_a_line_with_its_ranks_and_devices():
    h100 = "NVIDIA H100"
    cpu = torch.device("cpu")
    assert host_lines([("a", torch.device("cuda", k), h100, 12) for k in range(8)]) == [
        "ranks 0-7 on a: cuda:0-7 (NVIDIA H100, 12 CPU threads each)"
    ]
    assert host_lines(
        [("a", cpu, "EPYC", 1), *[("b", cpu, "EPYC", 2)] * 2, ("a", cpu, "EPYC", 1)]
    ) == [
        "ranks 0,3 on a: cpu (EPYC, 1 CPU thread each)",
        "ranks 1-2 on b: cpu (EPYC, 2 CPU threads each)",
    ]
    alone = torch.device("cuda", 0)  # a task that sees only its own GPU
    assert host_lines([("a", alone, h100, 1)] * 2 + [("a", alone, "Tesla T4", 1)]) == [
        "ranks 0-1 on a: cuda:0,0 (NVIDIA H100, 1 CPU thread each)",
        "rank 2 on a: cuda:0 (Tesla T4, 1 CPU thread)",
    ]


def test_the_memory_of_a_gpu_is_told_in_gib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    assert memory_used(torch.device("cuda")).endswith(" GiB, on the GPU 1.50 GiB")
