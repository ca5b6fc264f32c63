"""Say why a training stands still: in which call each rank waits, and where the ranks differ.

    torchrun --nproc-per-node=2 launch/why_hang.py run train.py --epochs 3
    python launch/why_hang.py ask                 while it stands still, in another terminal
    python launch/why_hang.py read traces/rank_*  files that NCCL's flight recorder has written

`run` starts a script as it would start alone, and records its collectives. `ask` lets all ranks
write what they do to the folder in WHY_HANG (default: hang), which all machines must share and you
may remove afterwards.
"""

import argparse
import json
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

# Behind the reader's own modules, one of which may be named as one of ours
sys.path.append(str(Path(__file__).resolve().parent))

from rank_watch import script
from rank_watch.calls import differences, join
from rank_watch.places import calls_of, nccl_is_unrecorded, place_of_thread, recorded_calls

FOLDER = Path(os.environ.get("WHY_HANG", "hang"))
LOOKS = 50  # for an answer, 0.2 s apart: counted, since a machine that pauses is no silent rank
# What launchers set: the variables of the rank and of the world size
LAUNCHERS = [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
LAUNCHERS += [("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "ask", "read"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="a script and its flags, or files")
    args = parser.parse_args()
    if bool(args.rest) != (args.command != "ask"):
        parser.error(f"{args.command}: expected {'nothing' if args.rest else 'more'} after it")
    return args


def main():
    args = parse_args()
    if args.command == "run":
        run(args.rest)
    elif args.command == "ask":
        before, _ = ask()
        time.sleep(1)
        after, missing = ask()
        if moving := [
            rank for rank, one in after.items() if one["calls"] != before.get(rank, one)["calls"]
        ]:
            print(f"{join(moving)} made calls within a second: not all stand still")
        print("\n".join(explain(after, missing)))
    else:
        print("\n".join(explain(dict(map(read, map(Path, args.rest))), {})))


# In the ranks


def run(command):
    """Run a script in this process, with a thread that answers questions.

    After --cpu, a script that asks for GPUs runs on the CPU.
    """
    cpu = command[0] == "--cpu"
    command = command[cpu:]
    script.exit_unless_python(
        command[0], "torchrun --nproc-per-node=2 launch/why_hang.py run train.py"
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch reads it: calls to remember
    known = [names for names in LAUNCHERS if all(os.environ.get(name) for name in names)]
    rank, world_size = [int(os.environ[name]) for name in known[0]] if known else (0, 1)
    me = {"rank": rank, "world_size": world_size}
    me |= {"pid": os.getpid(), "host": socket.gethostname()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    write(FOLDER / f"rank-{rank}.json", me)
    threading.Thread(target=answer, args=(me,), daemon=True).start()
    sys.argv = command
    from rank_watch import on_cpu  # torch reads the variable above when it is imported

    if cpu:
        on_cpu.install()
    try:
        script.run(command[0])
    except Exception as error:
        line = on_cpu.explain(error, "why_hang.py", "torchrun ... launch/why_hang.py run")
        if line is None:
            raise
        script.say(line)
        sys.exit(1)


def answer(me):
    """Answer each new question in the folder, for as long as the process lives."""
    answered = question()
    while True:
        time.sleep(0.2)
        asked = question()
        if asked == answered:
            continue
        at = place_of_thread(threading.main_thread().ident)
        what = me | {"question": asked, "at": at, "calls": recorded_calls()}
        what["nccl_is_unrecorded"] = nccl_is_unrecorded()
        write(FOLDER / f"rank-{me['rank']}.json", what)
        answered = asked


def question():
    """Return the newest question in the folder, or None."""
    path = FOLDER / "question.json"
    return json.loads(path.read_text()) if path.exists() else None


def write(path, value):
    """Write a JSON file, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.replace(path)


# Asking


def ask():
    """Return what the ranks answer, and for each that does not, why: {rank: ...} both."""
    files = sorted(FOLDER.glob("rank-*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        sys.exit(f"no rank in {FOLDER}/: start the training with why_hang.py run, see --help")
    world_size = json.loads(files[-1].read_text())["world_size"]  # of the newest training
    asked = str(uuid.uuid4())
    write(FOLDER / "question.json", asked)
    for _ in range(LOOKS):
        time.sleep(0.2)
        known = [json.loads(path.read_text()) for path in files]
        ranks = {one["rank"]: one for one in known if one["rank"] < world_size}
        silent = [rank for rank, one in ranks.items() if one.get("question") != asked]
        if not silent:
            break
    missing = {rank: why_silent(ranks[rank]) for rank in silent}
    return {rank: one for rank, one in ranks.items() if rank not in silent}, missing


def why_silent(one):
    """Return why a rank does not answer, as far as it can be seen from here."""
    where = f"process {one['pid']} on {one['host']}"
    if one["host"] != socket.gethostname():
        return f"{where} does not answer: look whether the machine can be reached"
    try:
        state = Path(f"/proc/{one['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{where} has ended"
    if state == "T":
        return f"{where} is stopped: kill -CONT {one['pid']}"
    return f"{where} does not answer: its Python is busy"


def read(path):
    """Return (rank, answer) of a file of NCCL's flight recorder, whose name ends in the rank."""
    rank = int(path.name.rpartition("_")[2])
    record = pickle.loads(path.read_bytes())
    return rank, {"rank": rank, "at": "an unknown place", "calls": calls_of(record)}


# Comparing


def explain(answers, missing):
    """Return the lines that say what happens: the cause first, then each rank."""
    lines = [f"rank {rank}: {reason}" for rank, reason in sorted(missing.items())]
    lines += [difference.text for difference in differences(answers)]
    if answers and all(one.get("nccl_is_unrecorded") for one in answers.values()):
        lines.append("no record of NCCL's calls in this PyTorch, or none was made: see the places")
    if not lines:
        lines = ["no rank waits in a collective, or torch has recorded none"]
    return lines + [f"rank {rank} is at {one['at']}" for rank, one in sorted(answers.items())]


if __name__ == "__main__":
    main()
