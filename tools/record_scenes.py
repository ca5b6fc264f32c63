"""Record the scenes of docs/see/: run their programs on two to four processes, and write scenes.js.

    python tools/record_scenes.py

A scene is a program in docs/see/, and what scenes.json says of it: the functions to follow, the
values to show, and its switches, each of which replaces some text of the program. Each process
records the lines that it executes with the values before each, its gradients and its messages.
Then the events of all processes are put into frames: a process goes on by one event per frame, but
it waits in a collective until the others have called it too. So the order is that of the program,
and the same in each recording; only the clock differs. The scene "machine" is 06_imagenet.py under
two torchruns: tools/lab/restart_scene.py.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.machine import free_port
from launch.rank_watch.calls import differences
from tools.lab import restart_scene

FOLDER = ROOT / "docs/see"
COLLECTIVES = ("all_reduce", "barrier")
SHARDED = {  # of FSDP; the names are those of torch before and since 2.13
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}
# How long a collective waits for other ranks. With the switch "hang", they never come.
PATIENCE = {"hang": timedelta(seconds=10)}


def scenes():
    return read()["scenes"]


def read():
    return json.loads((FOLDER / "scenes.json").read_text())


def source_of(scene, switch):
    """Return the text of a scene's program with one of its switches."""
    if "dies" in scene:
        return restart_scene.program()
    text = (FOLDER / scene["program"]).read_text()
    for old, new in scene["switches"][switch]:
        if text.count(old) != 1:
            raise ValueError(f"{scene['program']}: expected once: {old!r}")
        text = text.replace(old, new)
    return text


# In a process


class Player:
    """Runs a program in this process, and records what it does."""

    def __init__(self, scene, rank):
        self.path = str(FOLDER / scene["program"])
        self.functions = scene["functions"]
        self.watch = scene["watch"]
        self.follow_layers = scene.get("follow_layers", False)
        self.layers = 0  # that have computed
        self.rank = rank
        self.frame = None  # the innermost frame that is followed
        self.calls = 0  # collectives so far
        self.messages = {}  # {(from, to): how many}
        self.pending = []  # collectives of DDP that backward() waits for
        self.events = []
        self.start = None
        self.fresh = False  # since the last event: another function began, with its own values

    def run(self, source):
        code = compile(source, self.path, "exec")
        self.patch()
        sys.settrace(self.trace)
        try:
            exec(code, {"__name__": "__main__"})
        finally:
            sys.settrace(None)

    def trace(self, frame, kind, _):
        if frame.f_code.co_filename != self.path or frame.f_code.co_name not in self.functions:
            return None
        outer = self.frame
        self.start = self.start or time.perf_counter()
        self.fresh = self.fresh or outer is None
        raised = False  # since the last line: the function ends by an exception

        def follow(frame, kind, _):
            nonlocal raised
            self.frame = frame
            if kind == "line":
                self.add("line")
            elif kind == "exception":
                raised = True
            elif kind == "return":
                if outer is None and not raised:
                    self.add("return")
                self.frame = outer
            if kind != "exception":
                raised = False
            return follow

        self.frame = frame
        return follow

    def add(self, kind, **more):
        """Record an event at the current line, with the values of now."""
        if self.frame is None:
            return
        sys.settrace(None)
        ms = round(1000 * (time.perf_counter() - self.start))
        line = self.frame.f_lineno
        event = {"kind": kind, "line": line, "ms": ms} | more
        event.setdefault("values", self.values())
        if self.fresh:
            event["fresh"] = True
            self.fresh = False
        self.events.append(event)
        sys.settrace(self.trace)

    def values(self):
        found = restart_scene.values_at(self.frame, self.watch)
        return {label: plain(value) for label, value in found.items()}

    # What the program calls

    def patch(self):
        self.all_reduce = dist.all_reduce
        for name in COLLECTIVES:
            self.patch_collective(name, name)
        for name, shown in SHARDED.items():
            if hasattr(dist, name):
                self.patch_collective(name, shown)
        self.patch_messages()
        if self.follow_layers:
            self.patch_linear()
        self.patch_ddp()

    def patch_collective(self, name, shown):
        original = getattr(dist, name)

        def call(*args, **options):
            if self.frame is None:
                return original(*args, **options)
            self.calls += 1
            key = [shown, self.calls]
            sent = next((arg for arg in reversed(args) if torch.is_tensor(arg)), None)
            sent = None if shown == "barrier" else plain(sent)
            self.add("wait", keys=[key], sent=sent)
            result = original(*args, **options)
            self.add("done", keys=[key])
            return result

        setattr(dist, name, call)

    def patch_messages(self):
        isend, recv = dist.isend, dist.recv

        def count(pair):
            self.messages[pair] = self.messages.get(pair, 0) + 1
            return ["message", *pair, self.messages[pair]]

        def send_later(tensor, to):
            self.add("send", keys=[count((self.rank, to))], to=to, sent=plain(tensor))
            return isend(tensor, to)

        def receive(tensor, source):
            key = count((source, self.rank))
            self.add("receive", keys=[key], source=source)
            recv(tensor, source)
            self.add("done", keys=[key])

        dist.isend, dist.recv = send_later, receive

    def patch_linear(self):
        """Record when a layer computes, and when it has the gradient of its weights."""
        linear = torch.nn.functional.linear

        def show_whole_gradient(name, gradient):
            self.add("gradient", of=name, values=self.values() | {"whole": plain(gradient)})

        def compute(inputs, weight, bias=None):
            self.layers += 1
            name = str(self.layers)
            self.add("compute", of=name)
            if weight.requires_grad:
                weight.register_hook(functools.partial(show_whole_gradient, name))
            return linear(inputs, weight, bias)

        torch.nn.functional.linear = compute

    def patch_ddp(self):
        original = DistributedDataParallel.__init__
        all_reduce = self.all_reduce
        backward = torch.Tensor.backward

        def show_gradient(name, gradient):
            self.add("gradient", of=name, sent=plain(gradient))

        def init(ddp, module, **options):
            original(ddp, module, **options)
            names = {id(weight): name for name, weight in module.named_parameters()}
            for name, weight in module.named_parameters():
                weight.register_hook(functools.partial(show_gradient, name))

            def average(group, bucket):
                if self.frame is not None:
                    self.calls += 1
                    key = ["all_reduce", self.calls]
                    self.pending.append(key)
                    of = [names[id(weight)] for weight in bucket.parameters()]
                    self.add("bucket", keys=[key], of=of, sent=plain(bucket.buffer()))
                mine = bucket.buffer().div_(dist.get_world_size())
                work = all_reduce(mine, async_op=True)
                return work.get_future().then(lambda done: done.value()[0])

            ddp.register_comm_hook(None, average)

        def backward_and_wait(loss, *args, **options):
            backward(loss, *args, **options)
            if self.pending:
                # backward() itself has waited: values and time are those from before
                before = {key: self.events[-1][key] for key in ("values", "ms")}
                self.add("wait", keys=self.pending, **before)
                self.add("done", keys=self.pending)
                self.pending = []

        DistributedDataParallel.__init__ = init
        torch.Tensor.backward = backward_and_wait


def plain(value):
    """Return numbers as they are shown: a number, a list or a list of lists."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if torch.is_tensor(value):
        value = value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def play(rank, scene, switch, port, folder):
    """Run a program as one rank, and write what it did to a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(scene["ranks"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    init = dist.init_process_group
    dist.init_process_group = lambda backend: init(backend, timeout=PATIENCE.get(switch))
    player = Player(scene, rank)
    try:
        player.run(source_of(scene, switch))
    except RuntimeError:
        if switch not in PATIENCE:
            raise
    (Path(folder) / f"{rank}.json").write_text(json.dumps(player.events))
    os._exit(0)


# All processes together


def record(scene, switch):
    """Run a scene with a switch. Returns the events of each rank, a list of lists."""
    if "dies" in scene:
        return restart_scene.record(scene)
    ranks = scene["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        args = (scene, switch, free_port(), folder)
        # forked, because each new process would import torch for seconds
        torch.multiprocessing.start_processes(play, args, nprocs=ranks, start_method="fork")
        events = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    source = source_of(scene, switch).splitlines()
    for of_rank in events:
        look_at_lines(of_rank, source)
    return events


def look_at_lines(events, source):
    """Mark lines that sleep, and change the kind of each "for" or "with" that ends its block."""

    def indentation(event):
        text = source[event["line"] - 1]
        return len(text) - len(text.lstrip())

    for event, following in itertools.pairwise(events):
        text = source[event["line"] - 1].strip()
        leaves = following["kind"] == "return" or indentation(following) <= indentation(event)
        if event["kind"] == "line" and text.startswith(("for ", "with ")) and leaves:
            event["kind"] = "end"
        event["sleeps"] = event["kind"] == "line" and "time.sleep" in text


def frames_of(events):
    """Return the frames of a scene from the events of its ranks."""
    ranks = range(len(events))
    position = [0] * len(events)
    arrived = {}  # {key of a collective or message: ranks that have called it}
    shown = [{} for _ in ranks]  # values of each rank in the frame before
    frames = []

    def sleeps(rank):
        coming = events[rank][position[rank] :]
        return bool(coming) and coming[0].get("sleeps", False)

    def complete(key):
        """Whether nobody needs to be waited for: all have called it or died, or the sender has."""
        who = before.get(key, set())
        return key[1] in who if key[0] == "message" else who >= set(ranks) - dead

    while any(position[rank] < len(events[rank]) for rank in ranks):
        before = {key: set(who) for key, who in arrived.items()}
        ended = {rank for rank in ranks if position[rank] == len(events[rank])}
        dead = {rank for rank in ended if events[rank][-1]["kind"] == "killed"}
        frame = [None for _ in ranks]
        moved = False
        # a rank that sleeps goes on when no other can
        for rank in sorted(ranks, key=sleeps):
            if position[rank] == len(events[rank]):
                frame[rank] = last_of(events[rank])
                continue
            event = events[rank][position[rank]]
            keys = [tuple(key) for key in event.get("keys", [])]
            is_new = any(rank not in arrived.get(key, ()) for key in keys)
            for key in keys:
                arrived.setdefault(key, set()).add(rank)
            free = event["kind"] not in ("wait", "receive")
            free |= not is_new and all(complete(key) for key in keys)
            free &= not (moved and sleeps(rank))
            if event.get("fresh"):
                shown[rank] = {}
            changed = {k: v for k, v in event["values"].items() if shown[rank].get(k) != v}
            shown[rank] = shown[rank] | changed
            frame[rank] = state_of(event, changed)
            if free:
                position[rank] += 1
            moved |= free or is_new
        if not moved:
            frames.append({"ranks": frame, "hang": True})
            break
        if not frames or is_news(frame, frames[-1]["ranks"]):
            frames.append({"ranks": frame})
    return frames


def state_of(event, changed):
    """Return what a frame shows of a rank: the event, and the values that have changed."""
    shown = ("line", "of", "sent", "to", "source", "fresh", "kind", "ms")
    state = {key: event[key] for key in shown if event.get(key) is not None}
    if changed:
        state["values"] = changed
    if event.get("keys"):
        state["calls"] = [" ".join(map(str, key)) for key in event["keys"]]
    return state


def is_news(frame, before):
    """Return whether a frame shows something that the one before it does not."""
    return frame != [{key: one[key] for key in one if key != "values"} for one in before]


def last_of(events):
    """Return what a rank shows that has no more events: it has ended, or waits in its calls."""
    last = events[-1]
    if last["kind"] == "return":
        return {"kind": "ended"}
    if last["kind"] == "killed":
        return {"kind": "gone"}
    done = [key for event in events if event["kind"] == "done" for key in event["keys"]]
    called = [key for event in events for key in event.get("keys", []) if key not in done]
    calls = [" ".join(map(str, key)) for key in called]
    return {"kind": "wait", "line": last["line"], "calls": calls}


def why(events):
    """Return what launch/why_hang.py says of ranks that stand still."""
    answers = {}
    for rank, recorded in enumerate(events):
        calls = {}
        for event in recorded:
            for name, number in event.get("keys", []):
                done = event["kind"] == "done"
                place = f"step.py:{event['line']} in train()"
                shape = [len(event["sent"])] if isinstance(event.get("sent"), list) else []
                calls.setdefault(number, ["default_pg", number, name, [shape], done, place])
                calls[number][4] = done
        answers[rank] = {"at": "", "calls": list(calls.values())}
    return "\n".join(difference.text for difference in differences(answers))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "scenes.js", metavar="FILE")
    args = parser.parse_args()
    page = read()
    for name, scene in page["scenes"].items():
        scene["runs"] = {}
        for switch in scene["switches"]:
            events = record(scene, switch)
            run = {"program": source_of(scene, switch), "frames": frames_of(events)}
            if "hang" in run["frames"][-1]:
                run["says"] = why(events)
            scene["runs"][switch] = run
            print(f"{name}, {switch}: {len(run['frames'])} frames")
        del scene["switches"]
    text = f"const PAGE = {dumps(page['page'])};\nconst SCENES = {dumps(page['scenes'])};\n"
    args.out.write_text(text)


def dumps(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
