"""The files of launch/ that a user edits: they run as they stand, and those for Kubernetes are what
its API accepts.

Those for Slurm run in test_slurm.py and test_slurm_elastic.py, the 06_*.sh and store.py in
test_elastic.py as well.
"""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from launchers import VARIABLES
from needs import need
from processes import ROOT, STARTED, finished, read_until
from rungs import QUICK, parse
from torch.distributed.run import config_from_args, get_args_parser

from common.machine import free_port
from imagenet.signals import EXIT_REQUEUE
from launch import store

LAUNCH = ROOT / "launch"
CONTAINERS = LAUNCH / "containers"
JOBS = ["03_cpu.yaml", "06_imagenet.yaml", "06_trainjob.yaml"]
TINY_06 = ["--arch=mnist_net", "--image-size=16", "--batch-size=8", "--workers=0", "--eval-every=0"]
TINY_06 += ["--timeout=30"]
EDITABLE = ("PROCESSES", "INTERFACE", "HOSTS", "HOSTFILE", "MASTER", "PORT", "NODES", "STORE")


def launch(*command, **variables):
    """Start a launch file, or what it would start, with these variables and no others of a
    launcher.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES) and k not in EDITABLE}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env |= {name: str(value) for name, value in variables.items()}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    STARTED.append(
        subprocess.Popen(list(map(str, command)), env=env, start_new_session=True, **options)
    )
    return STARTED[-1]


# What they tell their launcher


@pytest.fixture
def stand_in(tmp_path):
    """A function that puts a shell script before torchrun or mpirun, and returns that PATH."""

    def stand_in(program, text):
        path = tmp_path / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        return f"{path.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    return stand_in


SAY = """\
echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
for argument; do echo "$argument"; done
"""


@pytest.fixture
def understood(stand_in, monkeypatch):
    """A function that returns what torchrun understands of a command: its configuration, the flags
    of its script as this parses them, and the variables that torchrun finds.
    """

    def understood(command, variables):
        code, out, err = finished(launch(*command, **variables, PATH=stand_in("torchrun", SAY)))
        assert code == 0, err
        found, *given = out.splitlines()
        for name, value in variables.items():  # torchrun reads PET_*
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.chdir(ROOT)
        args = get_args_parser().parse_args(given)
        config, _, _ = config_from_args(args)
        flags = parse(monkeypatch, args.training_script, *args.training_script_args)
        return config, flags, found.split()

    return understood


SENSECORE = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "host0", "MASTER_PORT": 23456}
STATIC = {"MASTER": "host0", "PORT": 23456}


@pytest.mark.parametrize("file", ["sensecore.sh", "06_static.sh", *JOBS])
def test_torchrun_and_the_script_understand_a_launch_of_two_machines(file, understood):
    if file == "sensecore.sh":
        command = ["launch/sensecore.sh", "06_imagenet.py", "/data", "--resume"]
        variables = SENSECORE | {"PROCESSES": 8, "INTERFACE": "ib0"}
    elif file == "06_static.sh":
        command = ["launch/06_static.sh", 1, "/data"]
        variables = STATIC | {"PROCESSES": 8, "INTERFACE": "ib0"}
    else:
        command, variables = pod_runs(file, 1, "host0", 23456)
    config, flags, found = understood(command, variables)
    assert (config.min_nodes, config.max_nodes, config.rdzv_configs["rank"]) == (2, 2, 1)
    assert config.rdzv_endpoint == "host0:23456"
    assert config.nproc_per_node == (1 if file == "03_cpu.yaml" else 8)
    assert config.max_restarts == 0, "the other machine's processes would not start again"
    assert found == (["ib0", "ib0"] if file.endswith(".sh") else [])
    if file != "03_cpu.yaml":
        assert (flags.train_path, flags.resume) == ("/data", True)


def test_torchrun_understands_06_one_node(understood):
    command = ["launch/06_one_node.sh", "/data", "--epochs=3"]
    config, flags, found = understood(command, {"PROCESSES": 3})
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 3)
    assert config.max_restarts == 10 and found == ["1"], "restarts meet at a store of their own"
    assert (flags.train_path, flags.epochs, flags.resume) == ("/data", 3, True)


def test_torchrun_understands_06_elastic(understood):
    variables = {"STORE": "host9:29400", "PROCESSES": 3, "INTERFACE": "ib0"}
    config, flags, found = understood(["launch/06_elastic.sh", "/data"], variables)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 4, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "host9:29400")
    assert config.run_id == "resnet50" and config.max_restarts == 20
    settings = config.rdzv_configs
    assert settings["is_host"] == "0", "no machine that trains keeps the store"
    assert (settings["keep_alive_interval"], settings["keep_alive_max_attempt"]) == ("5", "3")
    assert found == ["ib0", "ib0", "1"]
    assert (flags.train_path, flags.resume) == ("/data", True)


def test_06_elastic_passes_one_signal_on_and_waits(stand_in, tmp_path):
    save = f"kill $!; sleep 0.5; echo once >>{tmp_path}/saved; exit 9"
    text = f"sleep 60 &\ntrap '{save}' TERM\necho started\nwait\n"
    job = launch("launch/06_elastic.sh", PATH=stand_in("torchrun", text))
    read_until(job, "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert (tmp_path / "saved").read_text() == "once\n"
    assert finished(job) == (143, "", "")


@pytest.mark.parametrize(
    ("variables", "master"),
    [
        ({"HOSTS": "10.0.0.1:8,10.0.0.2:8"}, "10.0.0.1"),
        ({"HOSTFILE": "hosts"}, "10.0.0.3"),
        ({"MASTER": "ib0"}, "ib0"),
    ],
)
def test_mpirun_sh_passes_the_address_of_rank_0_to_all_machines(
    stand_in, tmp_path, variables, master
):
    (tmp_path / "hosts").write_text("# two machines\n10.0.0.3 slots=8\n10.0.0.4 slots=8\n")
    text = f'echo "Open MPI $MASTER_ADDR $MASTER_PORT"\n{SAY}'
    path = stand_in("mpirun", text)
    if "HOSTFILE" in variables:
        variables = {"HOSTFILE": tmp_path / "hosts"}
    more = {"PORT": 5000, "INTERFACE": "eth0", "OMP_NUM_THREADS": 1, "PATH": path}
    code, out, err = finished(launch("launch/mpirun.sh", "train.py", "--lr=1", **variables, **more))
    assert code == 0, err
    address, interfaces, *given = out.splitlines()
    assert address == f"Open MPI {master} 5000" and interfaces.split() == ["eth0", "eth0"]
    passed_on = {given[i + 1] for i, word in enumerate(given) if word == "-x"}
    expected = {"PATH", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert passed_on == expected | {"OMP_NUM_THREADS"}
    assert given[-2:] == ["train.py", "--lr=1"] and given[-3].endswith("/python")


# The store


def test_the_store_listens_on_the_port_of_06_elastic(monkeypatch):
    text = (LAUNCH / "06_elastic.sh").read_text()
    monkeypatch.setattr(sys, "argv", ["store.py"])
    assert store.parse_args().port == int(re.search(r"STORE:-[\d.]+:(\d+)}", text)[1])
    monkeypatch.setattr(sys, "argv", ["store.py", "--port", "65536"])
    with pytest.raises(SystemExit, match="argument --port: found 65536, expected 1 to 65535"):
        store.parse_args()


# What is wrong


WRONG = [
    ({"RANK": ""}, "RANK is not set: SenseCore sets it for a job submitted with -d AllReduce"),
    ({"RANK": 2}, "RANK=2: expected the number of this machine, 0 to 1"),
    ({"LOCAL_RANK": 0}, "LOCAL_RANK=0: expected no other launcher: sensecore.sh"),
]


def test_sensecore_and_mpirun_say_which_variable_or_argument_is_wrong():
    script = "06_imagenet.py data/imagenet"
    cases = [("sensecore.sh", script.split(), *case, script) for case in WRONG]
    for file in ("sensecore.sh", "mpirun.sh"):
        said = "no script given: expected a script and its flags"
        cases.append((file, [], {}, said, f"launch/{file} {script} --resume"))
    for file, given, variables, found, command in cases:
        code, out, err = finished(launch(f"launch/{file}", *given, **SENSECORE | variables))
        assert (code, out) == (2, "") and len(err.splitlines()) == 1, err
        assert err.startswith(f"{file}: error: {found}") and command in err


# They train


@pytest.mark.slow
@pytest.mark.parametrize("file", JOBS)
def test_the_pods_of_a_job_train_together_by_their_command(file, small_folder, tmp_path):
    more = [*QUICK, small_folder, "--epochs=1"]
    if file.startswith("06"):
        more = [*TINY_06, "--epochs=1", "--checkpoints-path", tmp_path / "saved"]
    port = free_port()
    pods = []
    for rank in (1, 0):
        command, variables = pod_runs(file, rank, "127.0.0.1", port, processes=1)
        command = [small_folder if part == "/data" else part for part in command]
        pods.append(launch(*command, *more, **variables))
    (code1, out1, err1), (code0, out0, err0) = map(finished, pods)
    assert (code0, code1) == (0, 0), err0 + err1
    assert "started by torchrun | world size 2 (1 on this machine)" in out0
    assert out0.count("done: ") == 1 and out1 == "", "rank 0 alone prints"


@pytest.fixture
def mpirun_sh():
    """A function (*given, **variables) that starts mpirun.sh."""
    need(None if shutil.which("mpirun") else "not installed: mpirun (apt-get install openmpi-bin)")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    return lambda *given, **variables: launch("launch/mpirun.sh", *given, **root | variables)


@pytest.mark.slow
def test_mpirun_sh_makes_one_world_and_ends_it_with_all_saved(mpirun_sh, tmp_path):
    """Mpirun sh makes one world and ends it with all saved when it is asked to."""
    (tmp_path / "hosts").write_text("# this machine, with two processes\nlocalhost slots=2\n")
    given = ["06_imagenet.py", "--dummy=64", *TINY_06, "--print-every=1"]
    given += ["--checkpoints-path", tmp_path / "saved"]
    job = mpirun_sh(*given, "--epochs=100000", HOSTFILE=tmp_path / "hosts")
    seen = read_until(job, "== step:")
    assert "06_imagenet.py | started by mpirun | world size 2 (2 on this machine)" in seen
    job.send_signal(signal.SIGUSR1)
    code, out, err = finished(job)
    saved = re.search(r"stopped by a signal after step (\d+): saved", out)
    assert code == EXIT_REQUEUE and saved, out + err
    epochs = int(saved[1]) // 8 + 1
    again = mpirun_sh(*given, f"--epochs={epochs}", "--resume", HOSTS="localhost:2")
    code, out, err = finished(again)
    assert code == 0, err
    assert f"after step {saved[1]} of {8 * epochs}" in out and out.count("done: ") == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are counted on Linux only")
def test_mpirun_sh_leaves_all_cores_to_every_process(mpirun_sh, tmp_path):
    """mpirun would bind each of two processes to one core, and its threads and loader workers with
    it.
    """
    in_one_piece = "import os; os.write(1, f'cores {len(os.sched_getaffinity(0))}\\n'.encode())\n"
    (tmp_path / "cores.py").write_text(in_one_piece)
    code, out, err = finished(mpirun_sh(tmp_path / "cores.py", HOSTS="localhost:2"))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"cores {len(os.sched_getaffinity(0))}"] * 2


def test_mpirun_sh_without_open_mpi_says_so(stand_in):
    path = stand_in("mpirun", "echo HYDRA build details:\n")
    code, _, err = finished(launch("launch/mpirun.sh", "x.py", PATH=path))
    assert code == 2
    assert err.startswith("mpirun.sh: error: mpirun is 'HYDRA build details:': expected Open MPI")


# Kubernetes


def read(file):
    """The objects in one of the YAML files."""
    return list(yaml.safe_load_all((LAUNCH / "kubernetes" / file).read_text()))


def pod_runs(file, rank, host, port, processes=None):
    """The command of a pod of two, and the variables that its operator sets."""
    *_, job = read(file)
    is_trainjob = job["kind"] == "TrainJob"
    spec = job["spec"]["trainer"] if is_trainjob else job["spec"]
    processes = processes or spec["numProcPerNode" if is_trainjob else "nprocPerNode"]
    master = {"MASTER_ADDR": host, "MASTER_PORT": port}
    given = master | {"NNODES": 2, "NODE_RANK": rank, "NPROC_PER_NODE": processes}
    variables = {f"PET_{name}": str(value) for name, value in given.items()}
    if is_trainjob:  # as the torch plugin of Trainer 2.2
        return [*spec["command"], *spec["args"]], variables
    # as envvar.go of the training operator, 1.7 to 1.9, without elasticPolicy
    place = {"WORLD_SIZE": 2 * int(processes), "RANK": rank, "PYTHONUNBUFFERED": 1}
    variables |= {name: str(value) for name, value in (master | place).items()}
    (container,) = pod_of(file)["containers"]

    def put_in(name):  # Kubernetes leaves a variable that is not set as it is
        return variables.get(name[1], name[0])

    parts = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", put_in, part) for part in parts], variables


def pod_of(file):
    """The specification of the pods of a job."""
    first = read(file)[0]
    if first["kind"] == "PyTorchJob":
        return first["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (replicated,) = first["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


def api(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        need(f"not installed: {module} (pip install -r requirements-dev.txt)")


def as_the_api_reads(given):
    """An object after the models of the API have read it, without unknown keys and wrong types."""
    if given["kind"] in ("TrainingRuntime", "TrainJob"):
        model = getattr(api("kubeflow_trainer_api.models"), f"TrainerV1alpha1{given['kind']}")
        return model.from_dict(given).to_dict()
    package, model = {
        "PyTorchJob": ("kubeflow.training", "KubeflowOrgV1PyTorchJob"),
        "PersistentVolumeClaim": ("kubernetes.client", "V1PersistentVolumeClaim"),
    }[given["kind"]]
    client = api(package).ApiClient()
    answer = SimpleNamespace(data=json.dumps(given))
    return client.sanitize_for_serialization(client.deserialize(answer, model))


@pytest.mark.parametrize("file", [*JOBS, "checkpoints.yaml"])
def test_the_api_accepts_what_a_file_for_kubernetes_says(file):
    for given in read(file):
        assert as_the_api_reads(given) == given


def test_a_pod_has_what_its_script_reads_and_shared_memory():
    (claim,) = read("checkpoints.yaml")
    for file in JOBS:
        pod = pod_of(file)
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == volumes.keys()
        assert volumes[mounts.pop("/dev/shm")]["emptyDir"]["medium"] == "Memory"
        command, _ = pod_runs(file, 0, "host0", 23456)
        paths = [part.partition("=")[2] or part for part in command]
        assert {path for path in paths if path.startswith("/")} == mounts.keys()
        if "checkpoints" in volumes:
            name = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
            assert name == claim["metadata"]["name"]


# Containers


def test_the_images_install_the_same_packages(stand_in, tmp_path):
    """Both run packages.sh. Without libibverbs, NCCL uses TCP; --compile needs g++."""
    for file in ("Dockerfile", "apptainer.def"):
        assert re.search(r"^ *(RUN )?bash .*packages.sh$", (CONTAINERS / file).read_text(), re.M)
    for program in ("apt-get", "python", "rm"):
        path = stand_in(program, f'echo {program} "$@"\n')
    script = shutil.copy(CONTAINERS / "packages.sh", tmp_path)
    code, out, err = finished(launch("bash", script, PATH=path))
    assert code == 0, err
    _, install, _, pip = out.splitlines()
    assert install.startswith("apt-get install --yes ")
    assert {"libibverbs1", "ibverbs-providers", "g++"} <= set(install.split())
    assert pip.endswith(f" --requirement {tmp_path}/requirements.txt")


@pytest.mark.slow
def test_the_image_holds_all_that_the_jobs_need(tmp_path):
    """Here: a folder with what the Dockerfile copies, in which the scripts of the jobs, and
    preflight, say how they are used.
    """
    lines = (CONTAINERS / "Dockerfile").read_text().splitlines()
    for *names, target in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for path in (path for name in names for path in ROOT.glob(name)):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, tmp_path / target if path.is_dir() else tmp_path)
    assert (tmp_path / "requirements.txt").exists()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    scripts = [["launch/preflight.py"]]
    for file in JOBS:
        command, _ = pod_runs(file, 0, "host0", 23456)
        first = next(k for k, part in enumerate(command) if part.endswith(".py"))
        scripts.append(command[first:])
    for script in scripts:
        options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
        end = subprocess.run([sys.executable, *script, "--help"], **options)
        assert end.returncode == 0 and end.stdout.startswith("usage: "), end.stderr
