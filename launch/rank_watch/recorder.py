"""Record what one rank of a training does, and send it to the monitor: hashes, never the data."""

import contextlib
import gc
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from rank_watch import before, hooks, on_cpu, watched
from rank_watch.hooks import replace
from rank_watch.places import (
    is_own,
    one_line,
    own_line,
    own_line_of_error,
    place_of_thread,
    recorded_calls,
)
from rank_watch.script import rank, say, write_error_file

PATIENCE = 5  # seconds to connect to the monitor
COMMAND = "torchrun --nproc-per-node=2 launch/check_ranks.py"

exit_process = os._exit
recorder = None  # of this process


class Recorder:
    """Watches the training of this process, from install() to finish().

    It collects events, which are dictionaries, and sends them to the monitor as lines of JSON. The
    monitor is a process that rank 0 starts.

    It holds no object of the script: a DDP that only the recorder held would go on to average.
    """

    def __init__(self, max_steps, epoch_steps):
        self.max_steps = max_steps  # training steps, after which the run ends; 0: never
        self.epoch_steps = epoch_steps  # batches, after which each pass over a loader ends; 0: all
        self.pid = os.getpid()
        self.thread = threading.get_ident()  # that trains
        self.rank = None
        self.world_size = None
        self.connection = None  # to the monitor
        self.events = []  # that are not sent yet
        self.sending = threading.RLock()  # two threads add events and send them
        self.verdict = None  # of the monitor: {"code": ..., "text": ...}
        self.listener = None  # a thread, which ends when the verdict is there
        self.finishing = threading.Lock()
        self.started_processes = False  # with mp.spawn

        self.all_steps = 0
        self.at_end = []  # functions of what is watched: they send what is left

    # What torch calls

    def install(self):
        """Make torch report what it does to this recorder, for the rest of this process's life."""
        global recorder
        recorder = self
        # init_device_mesh() has a name of its own for the function
        for owner in (dist, dist.distributed_c10d, dist.device_mesh):
            replace(owner, "init_process_group", self.join)
        replace(os, "_exit", self.leave)
        spawning = sys.modules["torch.multiprocessing.spawn"]
        for owner in (spawning, torch.multiprocessing):
            replace(owner, "start_processes", self.start_processes)
        for kind in watched.KINDS:
            kind.install(self)
        before.install(self)

    def join(self, real, *args, **kwargs):
        if self.connection or dist.is_initialized() or os.getpid() != self.pid:
            return real(*args, **kwargs)
        result = real(*args, **kwargs)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size == 1:
            flush_files()
            self.finish_alone()
            exit_process(self.exit_code(0))
        self.connect()
        return result

    def end_run(self, steps):
        """End this process after the last training step that is watched."""
        if os.getpid() == self.pid:  # not in a fork, such as of mp.Process
            flush_files()
            self.finish("steps", steps=steps)
            exit_process(self.exit_code(0))

    # Processes that this one starts

    def start_processes(self, real, fn, *args, **kwargs):
        self.started_processes = True
        return real(Watched(fn, self.max_steps, self.epoch_steps), *args, **kwargs)

    # Messages

    def add(self, kind, **values):
        if os.getpid() == self.pid:  # not in a worker of a loader
            with self.sending:
                self.events.append({"kind": kind} | values)

    def connect(self):
        """Connect to the monitor, which rank 0 starts. Its address is in the group's store."""
        store = dist.PrefixStore("check_ranks", dist.distributed_c10d._get_default_store())
        if self.rank == 0:
            listener = socket.create_server(("", 0), backlog=self.world_size)
            token = secrets.token_hex(16)
            monitor = Path(__file__).with_name("monitor.py")
            arguments = [listener.fileno(), token, self.world_size, os.getpid()]
            subprocess.Popen(
                [sys.executable, str(monitor), *map(str, arguments)],
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a launcher that ends this rank ends its process group
                stdin=subprocess.DEVNULL,
            )
            port = listener.getsockname()[1]
            listener.close()
            store.set("address", json.dumps([socket.gethostname(), port, token]))
        host, port, token = json.loads(store.get("address"))
        hosts = [os.environ.get("MASTER_ADDR"), host]
        if host == socket.gethostname():
            hosts.insert(0, "127.0.0.1")
        me = {"rank": self.rank, "host": socket.gethostname()}
        for name in filter(None, hosts):
            with contextlib.suppress(OSError):
                self.connection = socket.create_connection((name, port), PATIENCE)
                self.send([{"kind": "hello", "token": token} | me])
                self.replies = self.connection.makefile()
                if self.replies.readline():  # the monitor accepts the token
                    break
                self.connection = None
        if self.connection is None:
            sys.exit(f"check_ranks.py: rank {self.rank} cannot connect to {host}:{port} of rank 0")
        self.connection.settimeout(None)
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def send(self, events):
        text = "".join(json.dumps(event, default=as_plain) + "\n" for event in events)
        with self.sending:
            self.connection.sendall(text.encode())

    def flush(self):
        if self.connection is None or os.getpid() != self.pid:
            return
        with self.sending, contextlib.suppress(OSError):  # the monitor has ended
            events, self.events = self.events, []
            self.send(events)

    def listen(self):
        """Answer the monitor's questions, until it sends its verdict or ends."""
        with contextlib.suppress(OSError):
            for line in self.replies:
                message = json.loads(line)
                if message["kind"] == "verdict":
                    self.verdict = message
                    break
                self.flush()
                at = place_of_thread(self.thread)
                self.send([{"kind": "calls", "question": True} | calls_so_far(at)])
        if self.verdict is None:
            text = "check_ranks.py: the process that compares the ranks has ended too early"
            self.verdict = {"code": 1, "text": text, "now": False}
            print(text, file=sys.stderr)
        if self.verdict and self.verdict["now"]:  # this rank hangs, or will never be needed again
            self.write_error_file()
            flush_files()
            exit_process(self.exit_code(0))

    # The end

    def leave(self, real, code):
        if os.getpid() == self.pid:
            error, line = f"exit code {code}", own_line()
            if exception := sys.exc_info()[1]:
                error, line = one_line(exception), own_line_of_error(exception)
            self.finish("failed" if code else "end", error=error, line=line)
            code = self.exit_code(code)
        real(code)

    def finish(self, why, **values):
        """Send what is left, and wait for the verdict. Once: later calls return at once."""
        if os.getpid() != self.pid or not self.finishing.acquire(blocking=False):
            return
        if self.connection is None:
            if why != "failed":
                self.finish_alone()
            return
        for send_the_rest in self.at_end:
            send_the_rest(why)
        self.add("missing", names=hooks.missing)
        self.add("calls", **calls_so_far(at=""))
        self.add("done", why=why, **values)
        self.flush()
        if self.listener:  # else this is the one process of --before
            self.listener.join()
        self.write_error_file()

    def finish_alone(self):
        """Say what is wrong in a process that has no other rank."""
        if self.started_processes:
            return
        count = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", 1)))
        self.rank = rank()
        text = (
            "check_ranks.py: one process, so there are no ranks to compare: expected two or more; "
            f"{COMMAND} train.py; with one GPU, on the CPU: {COMMAND} --cpu train.py"
        )
        if count > 1 and dist.is_initialized():
            text = "check_ranks.py: the process group was made in a way that is not watched"
        elif count > 1 and not self.all_steps and not torch.cuda.is_available():
            text = (
                "check_ranks.py: the script ended before it made a process group or a training "
                f"step. If it looks for GPUs: {COMMAND} --cpu train.py"
            )
        elif count > 1:
            text = (
                f"found: {self.all_steps} training steps, and no process group: the script "
                f"never called init_process_group(), so each of the {count} processes trains a "
                "model of its own (docs/copy-setup-distributed.md)"
            )
        self.verdict = {"code": 1 if text.startswith("found") else 2, "text": text}
        if self.rank == 0:
            print(text, flush=True)
            self.write_error_file()

    def exit_code(self, code):
        """Return the exit code of this process, whose script ended with `code`."""
        if code == 0 and self.rank == 0 and self.verdict:
            return self.verdict["code"]
        return code

    def write_error_file(self):
        """Let torchrun print the findings as the cause, last of all."""
        if self.rank == 0 and self.verdict and self.verdict["code"]:
            write_error_file(self.verdict["text"])


class Watched:
    """A function that mp.spawn calls, in a process that is watched."""

    def __init__(self, function, max_steps, epoch_steps):
        self.function = function
        self.options = max_steps, epoch_steps

    def __call__(self, *args):
        if recorder is None:
            if on_cpu.VARIABLE in os.environ:
                on_cpu.install()
            Recorder(*self.options).install()
        else:  # this process is a fork
            recorder.pid, recorder.thread = os.getpid(), threading.get_ident()
            recorder.started_processes = False
        watch(lambda: self.function(*args))


def watch(function):
    """Call function() under the recorder of this process, and exit as it ends."""
    code = 0
    try:
        variables = function()  # of the script, which Python also keeps until its end
        recorder.finish("end")
        del variables
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        line = own_line_of_error(error)
        recorder.finish("failed" if code else "end", error=f"exit code {code}", line=line)
    except BaseException as error:
        code = 1
        needs_gpu = on_cpu.explain(error, "check_ranks.py", COMMAND)
        if not recorder.verdict and not needs_gpu:  # else other ranks have ended the run
            print_error(error)
        values = {"line": own_line_of_error(error), "needs_gpu": needs_gpu}
        recorder.finish("failed", error=one_line(error), **values)
        if needs_gpu and recorder.connection:  # the monitor has printed it
            write_error_file(needs_gpu)
        elif needs_gpu:
            say(needs_gpu)
    code = recorder.exit_code(code)
    if code:
        flush_files()
        exit_process(code)  # mp.spawn would print a traceback of this


def flush_files():
    """Write what the script has printed, or written to files that are open: os._exit() does not."""
    for file in gc.get_objects():
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or detached
                file.flush()


def print_error(error):
    """Print an exception as Python does, from the first frame of the script on."""
    trace = error.__traceback__
    while trace and not is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def calls_so_far(at):
    return {"at": at, "calls": recorded_calls(), "cpu": time.process_time()}


def as_plain(value):
    """Return what JSON can hold of a value that it does not know, such as a number of numpy."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
