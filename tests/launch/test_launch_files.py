"""The files of launch/ that a user edits: they run as they stand, and those for Kubernetes are what
its API accepts.

Those for Slurm run in test_slurm.py and test_slurm_elastic.py, the 06_*.sh and store.py in
test_drill.py.
"""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launchers import VARIABLES
from needs import need
from processes import ROOT, STARTED, finished, read_until
from rungs import QUICK, parse
from torch.distributed.run import config_from_args, get_args_parser

from common.distributed import free_port
from imagenet.signals import EXIT_REQUEUE

LAUNCH = ROOT / "launch"
SHELL = sorted(
    str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch")
)
JOBS = ["03_cpu.yaml", "06_imagenet.yaml"]
TINY_06 = ["--arch=mnist_net", "--image-size=16", "--batch-size=8", "--workers=0", "--eval-every=0"]
TINY_06 += ["--timeout=30"]
SENSECORE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EDITABLE = ("PROCESSES", "INTERFACE", "HOSTS", "HOSTFILE", "MASTER", "PORT")


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


# All of them


@pytest.mark.parametrize("file", SHELL)
def test_a_launch_file_is_good_bash_and_can_be_started(file):
    checked = subprocess.run(["bash", "-n", LAUNCH / file], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (LAUNCH / file).read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(LAUNCH / file, os.X_OK) or file.endswith(".sbatch"), "sbatch reads its files"


def test_every_launch_file_is_run_by_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for path in LAUNCH.rglob("*"):
        if (
            path.is_file()
            and path.suffix != ".pyc"
            and path.name not in [*JOBS, "06_trainjob.yaml", "checkpoints.yaml"]
        ):
            run_by_name = f"launch/{path.relative_to(LAUNCH)}" in tests
            assert run_by_name or path.suffix == ".sbatch", (
                f"{path}: test_slurm.py runs all .sbatch, nothing runs this"
            )


# SenseCore


def sensecore(rank, machines, port, *given, **more):
    """sensecore.sh as one machine of several runs it."""
    place = {"RANK": rank, "WORLD_SIZE": machines, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return launch("launch/sensecore.sh", *given, PROCESSES=1, **place | more)


@pytest.mark.slow
def test_sensecore_sh_trains_on_one_machine(tmp_path):
    given = ["06_imagenet.py", "--dummy=32", *TINY_06, "--epochs=1"]
    given += ["--checkpoints-path", tmp_path / "saved"]
    code, out, err = finished(sensecore(0, 1, free_port(), *given))
    assert code == 0, err
    assert (
        "06_imagenet.py | started by torchrun | world size 1 |" in out and out.count("done: ") == 1
    )


@pytest.mark.slow
def test_sensecore_sh_makes_one_world_of_two_machines(small_folder):
    port = free_port()
    given = ["03_mnmc_ddp_launch.py", *QUICK, small_folder, "--epochs=1"]
    machines = [sensecore(rank, 2, port, *given) for rank in (1, 0)]
    (code1, out1, err1), (code0, out0, err0) = map(finished, machines)
    assert (code0, code1) == (0, 0), err0 + err1
    assert "03_mnmc_ddp_launch.py | started by torchrun | world size 2 (1 on this machine)" in out0
    assert out0.count("done: test accuracy") == 1 and out1 == "", "rank 0 alone prints"


def without(name):
    return [
        {name: ""},
        (
            f"{name} is not set: SenseCore sets it for a job submitted with -d "
            "AllReduce, not -d StandAlone"
        ),
    ]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        *(without(name) for name in SENSECORE),
        ({"RANK": 2}, "RANK=2: expected the number of this machine, 0 to 1"),
        ({"RANK": "one"}, "RANK=one: expected the number of this machine, 0 to 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: expected the number of machines, 1 or more"),
        (
            {"LOCAL_RANK": 0},
            "LOCAL_RANK=0: expected no other launcher: sensecore.sh starts torchrun",
        ),
    ],
)
def test_sensecore_sh_says_which_variable_is_wrong(variables, expected):
    """Sensecore sh says which variable is wrong and what to do."""
    code, out, err = finished(
        sensecore(0, 2, 29500, "06_imagenet.py", "data/imagenet", **variables)
    )
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert (
        err.startswith(f"sensecore.sh: error: {expected}") and "06_imagenet.py data/imagenet" in err
    )


@pytest.mark.parametrize("file", ["sensecore.sh", "mpirun.sh"])
def test_a_launch_file_without_a_script_says_how_to_give_one(file):
    """A launch file that is given no script says how to give one."""
    code, out, err = finished(launch(f"launch/{file}"))
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert (
        err.startswith(f"{file}: error: no script given: expected")
        and f"launch/{file} 06_imagenet.py" in err
    )


# mpirun


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
    code, out, err = finished(
        mpirun_sh(*given, f"--epochs={epochs}", "--resume", HOSTS="localhost:2")
    )
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


def test_mpirun_sh_without_open_mpi_or_its_hosts_says_so(mpirun_sh, tmp_path):
    code, _, err = finished(mpirun_sh("train.py", HOSTFILE=tmp_path / "none"))
    assert code == 2 and err.startswith(
        f"mpirun.sh: error: HOSTFILE={tmp_path}/none: expected a file with one line"
    )
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho HYDRA build details:\n")
    (tmp_path / "mpirun").chmod(0o755)
    other = launch("env", f"PATH={tmp_path}:{os.environ['PATH']}", "launch/mpirun.sh", "train.py")
    code, _, err = finished(other)
    assert code == 2 and err.startswith(
        "mpirun.sh: error: mpirun is 'HYDRA build details:': expected Open MPI"
    )


# Kubernetes


class StrictLoader(yaml.SafeLoader):
    """As Kubernetes reads YAML: a key that is there twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.YAMLError(f"twice in one place: {', '.join(map(str, twice))}")
        return super().construct_mapping(node, deep)


def read(file):
    """The objects in one of the YAML files."""
    return list(yaml.load_all((LAUNCH / "kubernetes" / file).read_text(), StrictLoader))


MODELS = {
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
}
VERSIONS = {"PyTorchJob": "kubeflow.org/v1", "PersistentVolumeClaim": "v1"}
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def validate(given):
    """Compare an object with the API's own models, more strictly than these do: no other keys, no
    other types.
    """
    for module in ("kubeflow.training.models", "kubernetes.client.models"):
        try:
            importlib.import_module(module)
        except ImportError:
            need(f"not installed: {module} (pip install -r requirements-dev.txt)")
    assert given["apiVersion"] == VERSIONS[given["kind"]], given["apiVersion"]
    _validate(given, MODELS[given["kind"]], given["kind"])


def _validate(value, kind, where):
    if many := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), f"{where}: {value!r} is no list"
        return [_validate(item, many[1], f"{where}[{i}]") for i, item in enumerate(value)]
    if mapping := re.fullmatch(r"dict[(\[]str, (.+)[)\]]", kind):
        assert isinstance(value, dict), f"{where}: {value!r} is no mapping"
        return {key: _validate(item, mapping[1], f"{where}.{key}") for key, item in value.items()}
    if kind in PLAIN:
        good = isinstance(value, PLAIN[kind]) and (
            kind in ("bool", "object") or not isinstance(value, bool)
        )
        assert good, f"{where}: {value!r} is no {kind}"
        return value
    package = "kubeflow.training" if kind.startswith("Kubeflow") else "kubernetes.client"
    model = getattr(importlib.import_module(f"{package}.models"), kind)
    assert isinstance(value, dict), f"{where}: {value!r} is no {kind}"
    names = {key: name for name, key in model.attribute_map.items()}
    assert value.keys() <= names.keys(), (
        f"{where}: no such key: {', '.join(value.keys() - names.keys())}"
    )
    parts = {
        names[k]: _validate(v, model.openapi_types[names[k]], f"{where}.{k}")
        for k, v in value.items()
    }
    try:
        return model(**parts)  # which looks whether all is there that must be
    except ValueError as error:
        raise AssertionError(f"{where}: {error}") from None


@pytest.mark.parametrize("file", [*JOBS, "checkpoints.yaml"])
def test_the_api_accepts_what_a_file_for_kubernetes_says(file):
    for given in read(file):
        validate(given)


def pod_of(job, replica="Master"):
    return job["spec"]["pytorchReplicaSpecs"][replica]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda job: job["spec"].update(nprocPerNode=8),
            "PyTorchJob.spec.nprocPerNode: 8 is no str",
        ),
        (
            lambda job: job["spec"].update(nProcPerNode="8"),
            "PyTorchJob.spec: no such key: nProcPerNode",
        ),
        (lambda job: job["spec"].pop("pytorchReplicaSpecs"), "PyTorchJob.spec: Invalid value for"),
        (
            lambda job: pod_of(job).update(terminationGracePeriodSeconds="60"),
            "terminationGracePeriodSeconds: '60' is",
        ),
        (
            lambda job: pod_of(job)["containers"][0].update(volumeMount=[]),
            r"containers\[0\]: no such key: volumeMount",
        ),
        (
            lambda job: pod_of(job)["volumes"][2]["emptyDir"].update(medium=True),
            "emptyDir.medium: True is no str",
        ),
        (
            lambda job: pod_of(job)["containers"][0].update(args="06_imagenet.py"),
            "args: '06_imagenet.py' is no list",
        ),
        (lambda job: job.update(apiVersion="kubeflow.org/v2"), "kubeflow.org/v2"),
    ],
)
def test_what_the_api_would_refuse_fails_here(change, expected):
    (job,) = read("06_imagenet.yaml")
    change(job)
    with pytest.raises(AssertionError, match=expected):
        validate(job)


def test_a_key_that_is_there_twice_fails_here():
    with pytest.raises(yaml.YAMLError, match="twice in one place: name"):
        yaml.load("{name: a, name: b}", StrictLoader)


@pytest.mark.slow
@pytest.mark.parametrize("file", JOBS)
def test_the_pods_of_a_job_have_mounts_and_shared_memory(file):
    """The pods of a job have what they mount and shared memory."""
    (job,) = read(file)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    policies = {replica["restartPolicy"] for replica in replicas.values()}
    assert policies == {"OnFailure" if "--resume" in str(job) else "Never"}, (
        "only what resumes may start again"
    )
    pod = pod_of(job)
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "as the operator wants it"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys() and len(volumes) == len(pod["volumes"]) == len(
        container["volumeMounts"]
    )
    assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory"
    paths = [part.partition("=")[2] or part for part in container["args"]]
    assert {path for path in paths if path.startswith("/")} == set(mounts.values()) - {"/dev/shm"}


def test_06_saves_into_the_claim_that_is_made_for_it():
    (claim,) = read("checkpoints.yaml")
    (job,) = read("06_imagenet.yaml")
    claims = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod_of(job)["volumes"]
        if v["name"] == "checkpoints"
    ]
    assert claims == [claim["metadata"]["name"]]
    gpus = pod_of(job)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == job["spec"]["nprocPerNode"], "a process a GPU"


def operator(job, rank, port, processes=None):
    """The variables that the training operator (1.7 to 1.9) gives a pod without elasticPolicy, by
    its envvar.go.
    """
    pods = sum(replica["replicas"] for replica in job["spec"]["pytorchReplicaSpecs"].values())
    processes = processes or job["spec"]["nprocPerNode"]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place = {
        "WORLD_SIZE": pods * int(processes),
        "RANK": rank,
        "PET_NODE_RANK": rank,
        "PET_NNODES": pods,
    }
    torchrun = {f"PET_{name}": value for name, value in master.items()} | {
        "PET_NPROC_PER_NODE": processes
    }
    return {
        name: str(value)
        for name, value in ({"PYTHONUNBUFFERED": 1} | master | place | torchrun).items()
    }


def command(job, variables):
    """What a pod runs, once Kubernetes has put in the variables; one that is not set it leaves as
    it is.
    """
    (container,) = pod_of(job)["containers"]
    parts = [*container["command"], *container["args"]]
    return [
        re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), part) for part in parts
    ]


def torchrun_of(job):
    """What the torchrun of a pod understands: its configuration and its arguments."""
    given = command(job, operator(job, 1, 23456))
    assert given[0] == "torchrun"
    args = get_args_parser().parse_args(given[1:])
    return config_from_args(args)[0], args


@pytest.mark.parametrize("file", JOBS)
def test_torchrun_and_the_script_understand_the_command_of_a_pod(file, monkeypatch):
    (job,) = read(file)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, args = torchrun_of(job)
    assert (config.min_nodes, config.max_nodes, config.rdzv_configs["rank"]) == (2, 2, 1)
    assert (
        config.nproc_per_node == int(job["spec"]["nprocPerNode"])
        and config.rdzv_endpoint == "127.0.0.1:23456"
    )
    parsed = parse(monkeypatch, args.training_script, *args.training_script_args)
    if file.startswith("06"):
        assert (parsed.train_path, parsed.resume, parsed.arch) == ("/data", True, "resnet50")


@pytest.mark.parametrize("file", JOBS)
def test_an_operator_without_pet_variables_ends_in_an_error(file):
    """An operator that sets no pet variables ends in an error and not in two trainings."""
    (job,) = read(file)
    old = {k: v for k, v in operator(job, 0, 23456).items() if not k.startswith("PET_")}
    with pytest.raises((ValueError, SystemExit)):
        config_from_args(get_args_parser().parse_args(command(job, old)[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("file", JOBS)
def test_the_pods_of_a_job_train_together_by_their_command(file, small_folder, tmp_path):
    (job,) = read(file)
    port = free_port()
    more = [*QUICK, small_folder, "--epochs=1"]
    if file.startswith("06"):
        more = [*TINY_06, "--epochs=1", "--checkpoints-path", tmp_path / "saved"]
    pods = []
    for rank in (1, 0):
        variables = operator(job, rank, port, processes=1)
        given = [small_folder if part == "/data" else part for part in command(job, variables)]
        pods.append(launch(*given, *more, **variables))
    (code1, out1, err1), (code0, out0, err0) = map(finished, pods)
    assert (code0, code1) == (0, 0), err0 + err1
    assert (
        "started by torchrun | world size 2 (1 on this machine)" in out0
        and out0.count("done: ") == 1
        and out1 == ""
    )


# Kubeflow Trainer


def accept(given):
    """Let the models of Trainer's API read an object. They refuse wrong types and forget wrong
    keys.
    """
    try:
        models = importlib.import_module("kubeflow_trainer_api.models")
    except ImportError:
        need("not installed: kubeflow_trainer_api (pip install -r requirements-dev.txt)")
    model = getattr(models, f"TrainerV1alpha1{given['kind']}")
    assert model.from_dict(given).to_dict() == given


def test_trainer_accepts_its_file():
    given = read("06_trainjob.yaml")
    assert [part["kind"] for part in given] == ["TrainingRuntime", "TrainJob"]
    assert {part["apiVersion"] for part in given} == {"trainer.kubeflow.org/v1alpha1"}
    for part in given:
        accept(part)


@pytest.mark.parametrize(
    "change",
    [
        lambda runtime, job: job["spec"]["trainer"].update(numNode=2),
        lambda runtime, job: job["spec"]["trainer"].update(numNodes="2"),
        lambda runtime, job: job["spec"].pop("runtimeRef"),
        lambda runtime, job: trainer_pod(runtime)["containers"][0].update(volumeMount=[]),
        lambda runtime, job: runtime["spec"]["template"]["spec"].update(failurePolicy=3),
    ],
)
def test_what_trainer_would_refuse_fails_here(change):
    runtime, job = read("06_trainjob.yaml")
    change(runtime, job)
    with pytest.raises((AssertionError, ValueError)):
        accept(runtime)
        accept(job)


def trainer_pod(runtime):
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return replicated["template"]["spec"]["template"]["spec"]


def test_a_trainjob_and_a_pytorchjob_run_the_same():
    runtime, job = read("06_trainjob.yaml")
    (legacy,) = read("06_imagenet.yaml")
    old, new = pod_of(legacy), trainer_pod(runtime)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert new["volumes"] == old["volumes"]
    assert new["terminationGracePeriodSeconds"] == old["terminationGracePeriodSeconds"]
    assert new["containers"][0]["name"] == "node", "as Trainer wants it"
    assert new["containers"][0]["volumeMounts"] == old["containers"][0]["volumeMounts"]
    trainer = job["spec"]["trainer"]
    assert trainer["args"] == old["containers"][0]["args"]
    assert trainer["resourcesPerNode"] == old["containers"][0]["resources"]
    assert str(trainer["numProcPerNode"]) == legacy["spec"]["nprocPerNode"]
    assert trainer["numNodes"] == sum(
        replica["replicas"] for replica in legacy["spec"]["pytorchReplicaSpecs"].values()
    )


def trainer_variables(rank, port, processes=8):
    """What Trainer 2.2 sets for torchrun, by its torch plugin."""
    values = {"NNODES": 2, "NPROC_PER_NODE": processes, "NODE_RANK": rank}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {f"PET_{name}": str(value) for name, value in values.items()}


def test_torchrun_understands_trainers_variables(monkeypatch):
    _, job = read("06_trainjob.yaml")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in trainer_variables(1, 23456).items():
        monkeypatch.setenv(name, value)
    assert job["spec"]["trainer"]["command"] == ["torchrun"]
    args = get_args_parser().parse_args(job["spec"]["trainer"]["args"])
    config, _, _ = config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("127.0.0.1:23456", 1)


@pytest.mark.slow
def test_the_pods_of_a_trainjob_train_together(small_folder, tmp_path):
    _, job = read("06_trainjob.yaml")
    port = free_port()
    more = [*TINY_06, "--epochs=1", "--checkpoints-path", tmp_path / "saved"]
    args = [small_folder if part == "/data" else part for part in job["spec"]["trainer"]["args"]]
    pods = [launch("torchrun", *args, *more, **trainer_variables(k, port, 1)) for k in (1, 0)]
    (code1, out1, err1), (code0, out0, err0) = map(finished, pods)
    assert (code0, code1) == (0, 0), err0 + err1
    assert "started by torchrun | world size 2 (1 on this machine)" in out0
    assert out0.count("done: ") == 1 and out1 == ""


# Containers

IMAGES = [ROOT / "launch/containers/Dockerfile", ROOT / "launch/containers/apptainer.def"]


def test_packages_sh_installs_what_nccl_and_compile_need(tmp_path):
    """Here: with stand-ins that print how they are called."""
    for program in ("apt-get", "python", "rm"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    shutil.copy(ROOT / "launch/containers/packages.sh", tmp_path)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", tmp_path / "packages.sh"]
    end = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    update, install, remove, pip = end.stdout.splitlines()
    assert update == "apt-get update"
    assert install.startswith("apt-get install --yes ")
    assert {"libibverbs1", "ibverbs-providers", "g++"} <= set(install.split())
    assert remove.startswith("rm -rf /var/lib/apt/lists/")
    expected = f"python -m pip install --no-cache-dir --requirement {tmp_path}/requirements.txt"
    assert pip == expected


def test_the_images_install_the_same_packages():
    """By packages.sh, which needs requirements.txt beside it."""
    docker, apptainer = (path.read_text() for path in IMAGES)
    assert (
        "COPY launch/containers/packages.sh requirements.txt ./\nRUN bash packages.sh\n" in docker
    )
    files = dict(re.findall(r"^    (\S+) (/opt/\S+)$", apptainer.split("%post")[0], re.M))
    assert list(files) == ["launch/containers/packages.sh", "requirements.txt"]
    assert all((ROOT / file).exists() for file in files)
    packages, requirements = map(Path, files.values())
    assert requirements == packages.with_name("requirements.txt")
    assert f"%post\n    bash {packages}\n" in apptainer
    (base,) = re.findall(r"^FROM (python:3\.\d+-slim)$", docker, re.M)
    assert f"Bootstrap: docker\nFrom: {base}\n" in apptainer


@pytest.mark.slow
def test_the_image_holds_all_that_the_jobs_need(tmp_path):
    """Here: a folder with what the Dockerfile copies, in which the scripts of the jobs, and
    preflight, say how they are used.
    """
    lines = IMAGES[0].read_text().splitlines()
    for *names, target in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for path in (path for name in names for path in ROOT.glob(name)):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, tmp_path / target if path.is_dir() else tmp_path)
    assert (tmp_path / "requirements.txt").exists()
    scripts = [["launch/preflight.py"]]
    for file in JOBS:
        _, given = torchrun_of(read(file)[0])
        scripts.append([given.training_script, *given.training_script_args])
    for script in scripts:
        command = [sys.executable, *script, "--help"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        end = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert end.returncode == 0 and end.stdout.startswith("usage: "), end.stderr
