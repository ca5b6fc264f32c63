"""Console lines and run records: what they say, and that time is measured right."""

import io
import json
import re
import sys

import pytest
import torch
from rungs import flags

from common import report as report_module
from common.console import Console, host_lines
from common.memory import MemoryImages
from common.report import Report

DESIGN = {
    *(
        "script",
        "dataset",
        "model",
        "world_size",
        "local_world_size",
        "backend",
        "device",
        "device_name",
        "cpu_threads",
    ),
    *(
        "batch_size",
        "global_batch",
        "lr",
        "amp",
        "sync_bn",
        "seed",
        "epoch",
        "seconds",
        "images_per_second",
    ),
    *(
        "data_wait_share",
        "train_loss",
        "train_acc",
        "test_loss",
        "test_acc",
        "torch",
        "torchvision",
        "python",
        "started",
        "repeat",
    ),
}


DATASET = MemoryImages(
    torch.zeros(100, 3, 8, 8, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64), 10
)


class Clock:
    """A clock that moves only when told to."""

    now = 100.0

    def __call__(self):
        return self.now


class Loader:
    """Batches of 10 images, each of which costs `wait` seconds to get."""

    def __init__(self, clock, steps, wait):
        self.clock = clock
        self.steps = steps
        self.wait = wait

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            self.clock.now += self.wait
            yield torch.zeros(10), torch.zeros(10)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report_module.time, "perf_counter", clock)
    return clock


def make(*given, rank=0, world_size=1):
    report = Report(flags(*given), torch.device("cpu"), local_world_size=1)
    report.console.rank = rank
    report.world_size = world_size
    report.test_images = 100
    report.record |= {"world_size": world_size, "global_batch": report.args.batch_size * world_size}
    return report


def train_epoch(report, clock, steps, wait, seconds_of_step):
    """Go through an epoch whose k-th step takes seconds_of_step(k); every image costs 2.0 and half
    are right.
    """
    totals = torch.zeros(3)
    for step, (_, targets) in enumerate(report.timed(Loader(clock, steps, wait), epoch=0)):
        clock.now += seconds_of_step(step + 1)
        totals += torch.tensor([2.0 * len(targets), 0.5 * len(targets), len(targets)])
        if report.due(step):
            report.show_step(step, totals)
            totals.zero_()


def test_step_lines_keep_the_established_form(clock, capsys):
    train_epoch(make(), clock, steps=196, wait=0.0, seconds_of_step=lambda k: 0.01)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "   == step: [ 50/196] [1/5] | loss: 2.000 | acc: 50.000% | 1000 img/s"
    assert [line[12:21] for line in lines] == ["[ 50/196]", "[100/196]", "[150/196]", "[196/196]"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_progress_bar_and_a_file_does_not(clock, monkeypatch):
    """A terminal shows a progress bar beside the lines and a file shows lines alone."""
    for output, has_bar in ((Terminal(), True), (io.StringIO(), False)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            train_epoch(
                make("--print-every", 2), clock, steps=5, wait=0.0, seconds_of_step=lambda k: 0.1
            )
        text = output.getvalue()
        assert re.findall(r"== step: \[ +(\d)/5\].* img/s\n", text) == ["2", "4", "5"]
        assert ("epoch 1/5:" in text and "loss 2.000, 100 img/s" in text) == has_bar
        assert ("\r" in text) == has_bar == ("/5 [" in text), "of five steps"


def test_other_ranks_show_no_progress_bar(clock, monkeypatch):
    output = Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    train_epoch(make(rank=1, world_size=2), clock, steps=5, wait=0.0, seconds_of_step=lambda k: 0.1)
    assert output.getvalue() == ""


def test_warm_up_steps_do_not_count_in_images_per_second(clock):
    """Warm up steps count in seconds but not in images per second."""
    report = make()
    train_epoch(
        report, clock, steps=100, wait=0.0, seconds_of_step=lambda k: 10.0 if k <= 5 else 0.1
    )
    assert report.images_per_second == pytest.approx(100)
    assert report.seconds == pytest.approx(5 * 10 + 95 * 0.1)


def test_a_short_epoch_is_not_all_warm_up(clock):
    report = make()
    train_epoch(report, clock, steps=3, wait=0.0, seconds_of_step=lambda k: 0.1)
    assert report.images_per_second == pytest.approx(100)


def test_the_share_of_time_spent_waiting_for_data_is_reported(clock, capsys):
    report = make()
    train_epoch(report, clock, steps=100, wait=0.03, seconds_of_step=lambda k: 0.07)
    report.show_epoch(torch.tensor([150.0, 55.0, 100.0]))
    assert (
        "loss: 1.500 | acc: 55.000% | epoch took 10.0 s, 100 img/s, 30.0% of it waiting for data"
        in capsys.readouterr().out
    )


def test_the_device_is_synchronised_before_the_clock_is_read(clock, monkeypatch):
    reads = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: reads.append(clock.now))
    report = make()
    report.meter.device = torch.device("cuda")
    train_epoch(report, clock, steps=20, wait=0.0, seconds_of_step=lambda k: 1.0)
    assert reads[0] == 100.0 and reads[-1] == 120.0 and 102.0 in reads  # begin, end, end of warm-up


def test_records_hold_what_the_design_asks_for(clock, tmp_path):
    log = tmp_path / "run.jsonl"
    report = make("--log-file", log)
    report.header(torch.nn.Linear(1, 1), DATASET, DATASET, lr=0.01)
    for _ in range(2):
        train_epoch(report, clock, steps=4, wait=0.0, seconds_of_step=lambda k: 0.1)
        report.show_epoch(torch.tensor([150.0, 25.0, 100.0]))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == 2 and set(records[0]) >= DESIGN
    assert (
        records[0]["train_loss"] == 2.0
        and records[0]["train_acc"] == 50.0
        and records[0]["test_loss"] == 1.5
        and records[0]["test_acc"] == 25.0
    )
    assert records[0]["global_batch"] == 256 and records[0]["device"] == "cpu"


def test_the_repeats_of_a_command_are_counted(clock, tmp_path, monkeypatch):
    log = tmp_path / "run.jsonl"
    for repeat in range(3):
        report = make("--log-file", log)
        report.record["started"] = str(repeat)
        for _ in range(2):  # a record per epoch
            train_epoch(report, clock, steps=4, wait=0.0, seconds_of_step=lambda k: 0.1)
            report.show_epoch(torch.tensor([150.0, 25.0, 100.0]))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["repeat"] for record in records] == [0, 0, 1, 1, 2, 2]


def test_only_rank_0_prints_and_writes(clock, tmp_path, capsys):
    log = tmp_path / "run.jsonl"
    report = make("--log-file", log, rank=1, world_size=2)
    train_epoch(report, clock, steps=4, wait=0.0, seconds_of_step=lambda k: 0.1)
    report.show_epoch(torch.tensor([150.0, 25.0, 100.0]))
    report.summary()
    assert capsys.readouterr().out == "" and not log.exists()


def test_the_header_shows_how_batch_and_rate_come_about(capsys, monkeypatch):
    report = make("--batch-size", 256, world_size=4)
    monkeypatch.setattr(report.console, "print_devices", lambda *_: None)
    report.header(torch.nn.Linear(1000, 1000), DATASET, DATASET, lr=0.04)
    out = capsys.readouterr().out
    assert "global batch = 256 x 4 = 1024 | lr 0.01 -> 0.04" in out
    assert re.search(r"started by python \| world size 4", out) and "resnet18, 1.0 M weights" in out


def test_every_host_has_a_line_with_its_ranks_and_devices():
    h100 = "NVIDIA H100"
    cpu = torch.device("cpu")
    assert host_lines([("a", torch.device("cuda", k), h100, 12) for k in range(8)]) == [
        "ranks 0-7 on a: cuda:0-7 (NVIDIA H100, 12 CPU threads each)"
    ]
    assert host_lines(
        [("a", cpu, "EPYC", 1), ("b", cpu, "EPYC", 2), ("b", cpu, "EPYC", 2), ("a", cpu, "EPYC", 1)]
    ) == [
        "ranks 0,3 on a: cpu (EPYC, 1 CPU thread each)",
        "ranks 1-2 on b: cpu (EPYC, 2 CPU threads each)",
    ]


def test_a_host_has_two_lines_if_its_devices_differ():
    """A host has two lines if its devices differ and each rank has its own."""
    alone = torch.device("cuda", 0)  # a task that sees only its own GPU
    lines = host_lines([("a", alone, "NVIDIA H100", 1)] * 2 + [("a", alone, "Tesla T4", 1)])
    assert lines == [
        "ranks 0-1 on a: cuda:0,0 (NVIDIA H100, 1 CPU thread each)",
        "rank 2 on a: cuda:0 (Tesla T4, 1 CPU thread)",
    ]


def test_many_hosts_have_16_lines(capsys, monkeypatch):
    def gather(everyone, mine):
        everyone[:] = [(f"host{rank}", *mine[1:]) for rank in range(20)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    Console(0).print_devices(torch.device("cpu"), "EPYC", 1, world_size=20)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 17
        and lines[15].startswith("rank 15 on host15: ")
        and lines[16] == "... and 4 more hosts"
    )


def test_images_per_second_are_those_of_all_ranks_of_the_world(clock):
    report = make(world_size=4)
    train_epoch(report, clock, steps=100, wait=0.0, seconds_of_step=lambda k: 0.1)
    assert report.images_per_second == pytest.approx(4 * 100)
