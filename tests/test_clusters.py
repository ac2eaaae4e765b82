"""configs/launch: the SLURM script with a SLURM of shell scripts, the manifests against Kubeflow's models, the page."""

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import kubeflow.training.models as v1
import kubeflow_trainer_api.models as v2
import kubernetes.client.models as core
import pytest
import yaml
from conftest import ROOT

from mingpt.config import Config, load_config
from mingpt.launch import main

FOLDER = ROOT / "configs" / "launch"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```$", README, re.S | re.M)
    for line in block.splitlines()
]

# Each notes how it was called. srun ends with the code in the file of its node, or waits for USR1, then 75.
SRUN = """#!/bin/bash
echo "$SRUN_CPUS_PER_TASK srun $*" >> calls
node=$(grep -o 'nodelist=[^ ]*' <<< "$*")
code=$(< "${node#*=}")
[[ $code == wait ]] && trap 'exit 75' USR1 || trap '' USR1
touch "ready-${node#*=}"
[[ $code == wait ]] || exit "$code"
for ((i = 0; i < 600; i++)); do read -rt 0.05 <> pipe; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == show && -p answer ]] && touch asked && read -r < answer
[[ $1 == show ]] && printf '%s\\n' ${3//,/ } || echo "scontrol $*" >> calls
"""


@dataclass
class Job:
    """slurm.sbatch as SLURM would run it, on nodes of which each has a code that its launcher ends with."""

    folder: Path
    codes: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> "subprocess.Popen[str]":
        os.mkfifo(self.folder / "pipe")
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (self.folder / name).write_text(text, encoding="utf-8")
            (self.folder / name).chmod(0o700)
        for node, code in self.codes.items():
            (self.folder / node).write_text(code, encoding="utf-8")
        slurm = {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "mingpt", "SLURM_JOB_NODELIST": ",".join(self.codes)}
        return subprocess.Popen(
            ["bash", str(FOLDER / "slurm.sbatch"), "my.yaml", "--name=a b"], cwd=self.folder, text=True,
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", **slurm, **self.environment}, stdout=subprocess.PIPE,
        )  # fmt: skip

    def calls(self, program: str) -> list[str]:
        file = self.folder / "calls"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [line for line in lines if program in line.split()[:2]]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("codes", "number", "code", "requeued"),
    [
        ("0 0", None, 0, False),
        ("0 1", None, 0, False),  # the training is done, whoever else failed
        ("1 1", None, 1, False),
        ("2 137", None, 2, False),
        ("75 75", None, 75, False),  # each was asked to stop, but not by the time limit
        ("wait wait", signal.SIGUSR1, 75, True),
        ("wait 1", signal.SIGUSR1, 1, True),
        ("wait 0", signal.SIGUSR1, 0, False),
    ],
)
def test_what_becomes_of_a_job(
    tmp_path: Path, codes: str, number: signal.Signals | None, code: int, requeued: bool
) -> None:
    job = Job(tmp_path, dict(zip(("n1", "n2"), codes.split(), strict=True)))
    process = job.start()
    if number:
        wait_for(*(tmp_path / f"ready-{node}" for node in job.codes))
        process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, f"ended with code {code}\n" in said) == (code, True)
    assert job.calls("scontrol") == ["scontrol requeue 71"] * requeued


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_stop_before_there_is_a_launcher_starts_none(tmp_path: Path, number: signal.Signals, requeued: bool) -> None:
    job = Job(tmp_path, {"n1": "0"})
    os.mkfifo(tmp_path / "answer")
    process = job.start()
    wait_for(tmp_path / "asked")
    process.send_signal(number)
    (tmp_path / "answer").write_text("go\n", encoding="utf-8")
    process.communicate(timeout=30)
    assert process.returncode == 75 and job.calls("srun") == []
    assert job.calls("scontrol") == ["scontrol requeue 71"] * requeued


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "1 --nnodes=1:3 --nproc-per-node=1 --rdzv-endpoint=n1:20071,n2:20071 --rdzv-id=71"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64"}, "64 --nnodes=1:3 --nproc-per-node=8"),
        ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_COUNT": "5"}, "1 --nnodes=1:5 --rdzv-id=70"),
        ({"SLURM_ARRAY_JOB_ID": "70"}, "1 --rdzv-endpoint={folder}/mingpt-70.meet"),
    ],
)
def test_every_node_gets_the_same_launcher(tmp_path: Path, environment: dict[str, str], expected: str) -> None:
    job = Job(tmp_path, dict.fromkeys(("n1", "n2", "n3"), "0"), environment)
    job.start().communicate(timeout=30)
    calls = job.calls("srun")
    assert len({re.sub("nodelist=n[123]", "", call) for call in calls}) == 1 and len(calls) == 3
    cpus, *words = expected.format(folder=tmp_path).split()
    assert calls[0].split()[0] == cpus and {*words} <= {*calls[0].split()}
    assert calls[0].endswith("train_gpt.py my.yaml --name=a b")


def unknown(value: Any, kind: str, where: str = "") -> list[str]:
    """What of a manifest is not as the models of Kubeflow's training operator (v1) have it."""
    if inner := re.fullmatch(r"list\[(.*)\]|dict\(str, (.*)\)", kind):
        items = enumerate(value) if inner[1] else value.items()
        return [problem for key, item in items for problem in unknown(item, inner[1] or inner[2], f"{where}.{key}")]
    if model := getattr(v1, kind, None) or getattr(core, kind, None):
        kinds = {model.attribute_map[name]: its for name, its in model.openapi_types.items()}
        found = [f"{where}.{key}" for key in value.keys() - kinds.keys()]
        for key in value.keys() & kinds.keys():
            found += unknown(value[key], kinds[key], f"{where}.{key}")
        return found
    types = {"str": str, "int": int, "bool": bool, "object": object, "datetime": datetime}
    return [] if isinstance(value, types[kind]) else [f"{where}={value}"]


def problems(manifest: dict[str, Any]) -> list[str]:
    """The same of Kubeflow Trainer (v2) too; what its models do not know they leave out."""
    if manifest["kind"] == "PyTorchJob":
        return unknown(manifest, "KubeflowOrgV1PyTorchJob")
    model = getattr(v2, f"TrainerV1alpha1{manifest['kind']}")
    try:
        return [] if model.from_dict(manifest).to_dict() == manifest else ["something that is not in the model"]
    except ValueError as error:  # pydantic's
        return [str(error)]


def read(name: str) -> dict[str, dict[str, Any]]:
    """Its manifests by kind."""
    return {it["kind"]: it for it in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


MANIFESTS = read("kubernetes-pytorchjob.yaml") | read("kubernetes-trainjob.yaml")
WORKER = MANIFESTS["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]
NODE = MANIFESTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
PODS = {"PyTorchJob": WORKER["template"], "TrainJob": NODE["spec"]["template"]}
CONTAINERS = {
    "PyTorchJob": WORKER["template"]["spec"]["containers"][0],
    "TrainJob": NODE["spec"]["template"]["spec"]["containers"][0] | MANIFESTS["TrainJob"]["spec"]["trainer"],
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_is_as_its_models_have_it(kind: str) -> None:
    assert problems(MANIFESTS[kind]) == []


@pytest.mark.parametrize("kind", PODS)
def test_its_pods_are_as_kubernetes_has_them(kind: str) -> None:
    assert v2.IoK8sApiCoreV1PodTemplateSpec.from_dict(PODS[kind]).to_dict() == PODS[kind]


@pytest.mark.parametrize(
    ("kind", "line", "other"),
    [
        ("PyTorchJob", "minReplicas: 1", "minReplicas: one"),
        ("PyTorchJob", "restartPolicy: OnFailure", "restartsPolicy: OnFailure"),
        ("PyTorchJob", "sizeLimit: 16Gi", "size: 16Gi"),
        ("TrainJob", "numNodes: 4", "nodes: 4"),
        ("TrainingRuntime", "action: Ignore", "action: ignore"),
        ("TrainingRuntime", "succeededCount: 1", "count: 1"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_found(kind: str, line: str, other: str) -> None:
    text = (FOLDER / f"kubernetes-{'pytorchjob' if kind == 'PyTorchJob' else 'trainjob'}.yaml").read_text("utf-8")
    assert line in text
    (changed,) = (it for it in yaml.safe_load_all(text.replace(line, other)) if it["kind"] == kind)
    assert problems(changed)


@pytest.mark.parametrize("kind", PODS)
def test_pods_have_what_the_training_needs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pod, container = PODS[kind]["spec"], CONTAINERS[kind]
    assert pod["terminationGracePeriodSeconds"] >= Config().elastic.grace_seconds + 40 + 60, "to stop, leave and save"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}]
    for variable in container["env"]:
        assert variable["valueFrom"]["secretKeyRef"]["name"] == "mingpt-store", "no key stands in a file"

    given = {"PET_NNODES": "1:4" if kind == "PyTorchJob" else "4"}  # by the operator
    words = [re.sub(r"\$\((\w+)\)", lambda it: given[it[1]], word) for word in container["args"]]
    assert container["command"] == ["python", "-m", "mingpt.launch"]
    script = words.index("train_gpt.py")
    assert main(["--dry-run", *words]) == 0
    assert "--nnodes=1:4 --nproc-per-node=gpu " in capsys.readouterr().out
    config = load_config(words[script + 1 :], ROOT / "configs" / "smoke.yaml", lambda _: "cuda")
    assert config.snapshot.uri == "s3://BUCKET/runs/mingpt", "a pod's own disk goes with it"


def test_a_stop_is_no_failure_of_a_pod() -> None:
    assert WORKER["restartPolicy"] == "OnFailure", "ExitCode takes 75 for a failure for good"
    assert NODE["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    assert PODS["TrainJob"]["spec"]["restartPolicy"] == "Never", "else a job with such a policy is refused"


def test_the_commands_of_the_page() -> None:
    """What they name is there; those of SLURM are run by test_slurm.py, those of Kubernetes nowhere."""
    words = [shlex.split(command) for command in COMMANDS]
    assert [it[0] for it in words] == ["sbatch", "sbatch", "scancel", "kubectl", "kubectl", "kubectl"]
    for word in [word for command in words for word in command if word.startswith("configs/")]:
        assert (ROOT / word).is_file()
    for path in [path for path in FOLDER.iterdir() if path.suffix != ".md"]:
        opening = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").splitlines()[0]
        assert opening.removeprefix("# ") in COMMANDS, "opens with its command"
    (secret,) = ([*it] for it in words if "secret" in it)
    for container in CONTAINERS.values():
        for variable in container["env"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] in secret
            assert [word for word in secret if word.startswith(f"--from-literal={reference['key']}=")]
