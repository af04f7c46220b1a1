"""The files for Kubeflow and SkyPilot pass their validators and start the ranks they ask for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"
PYTORCHJOB, SKYPILOT = LAUNCH / "pytorchjob.yaml", LAUNCH / "skypilot.yaml"
TRAINJOB = LAUNCH / "trainjob.yaml"


def strict(schema: Any) -> Any:
    """Return `schema` without room for unknown keys, which Kubernetes drops in silence."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | {key: strict(value) for key, value in schema.items()}


def validator(job: Path) -> jsonschema.Draft202012Validator:
    schema = Path(__file__).parent / f"{job.stem}_schema.json"
    return jsonschema.Draft202012Validator(strict(json.loads(schema.read_text())))


def test_the_pytorchjob_follows_the_operators_published_schema() -> None:
    job = yaml.safe_load(PYTORCHJOB.read_text())
    validator(PYTORCHJOB).validate(job)
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["name"] == "pytorch"  # the schema does not say that the operator needs it
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        *((PYTORCHJOB, wrong) for wrong in ("nprocPerNodes: 8", "nprocPerNode: 8", "nodes: 2")),
        *(
            (TRAINJOB, wrong)
            for wrong in ("trainer: {nodes: 2}", "trainer: {numProcPerNode: auto}")
        ),
        *((TRAINJOB, wrong) for wrong in ("podTemplateOverrides: []", "runtimeRef: {}")),
    ],
)
def test_the_schema_sees_a_mistake(file: Path, wrong: str) -> None:
    job = yaml.safe_load(file.read_text())
    job["spec"] |= yaml.safe_load(wrong)
    assert [error.path[0] for error in validator(file).iter_errors(job)] == ["spec"]


def pods_of_trainjob() -> dict[str, Any]:
    """Return what the TrainJob changes of the pods that train."""
    (patch,) = yaml.safe_load(TRAINJOB.read_text())["spec"]["runtimePatches"]
    (nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert nodes["name"] == "node"  # as the runtime torch-distributed calls them
    pods: dict[str, Any] = nodes["template"]["spec"]["template"]["spec"]
    return pods


def test_the_trainjob_follows_the_trainers_published_schema() -> None:
    job = yaml.safe_load(TRAINJOB.read_text())
    validator(TRAINJOB).validate(job)
    trainer, pods = job["spec"]["trainer"], pods_of_trainjob()
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (container,) = pods["containers"]
    assert container["name"] == "node"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pods["volumes"]
    }


def test_the_kubernetes_files_start_the_same_run() -> None:
    master = yaml.safe_load(PYTORCHJOB.read_text())["spec"]["pytorchReplicaSpecs"]["Master"]
    spec, pods = master["template"]["spec"], pods_of_trainjob()
    trainer = yaml.safe_load(TRAINJOB.read_text())["spec"]["trainer"]
    (container,) = spec["containers"]
    assert container["args"] == trainer["args"]
    assert container["resources"] == trainer["resourcesPerNode"]
    assert container["volumeMounts"] == pods["containers"][0]["volumeMounts"]
    for name in ("volumes", "terminationGracePeriodSeconds"):
        assert spec[name] == pods[name]


def test_sky_takes_the_task() -> None:
    """`make test-clusters` installs SkyPilot for it."""
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(SKYPILOT))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 8})
    assert list(task.storage_mounts) == ["/shared"]


def started(command: Sequence[str], folder: Path, **environment: str) -> list[str]:
    """Return the words of the command that a node runs, in a copy of the repository."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    if not (folder / "launch").exists():
        (folder / "launch").symlink_to(LAUNCH)
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(done.stdout)


def options(words: Sequence[str]) -> dict[str, str]:
    assert words[0] == "torchrun"
    names = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port")
    return {name: words[words.index(name) + 1] for name in names}


@pytest.mark.parametrize(("role", "rank"), [("Master", 0), ("Worker", 1)])
def test_a_pod_starts_its_part_of_the_ranks(role: str, rank: int, tmp_path: Path) -> None:
    """The environment is what the operator's ``setPodEnv`` sets, release 1.9."""
    spec = yaml.safe_load(PYTORCHJOB.read_text())["spec"]
    (container,) = spec["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"]
    pods = sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values())
    address = {"MASTER_ADDR": "qwen3vl-sft-8b-master-0", "MASTER_PORT": "23456"}
    words = started(
        [*container["command"], *container["args"], "--dry-run"],
        tmp_path,
        **address,
        **{f"PET_{name}": value for name, value in address.items()},
        WORLD_SIZE="16",
        RANK=str(rank),
        PET_NODE_RANK=str(rank),
        PET_NPROC_PER_NODE=spec["nprocPerNode"],
        PET_NNODES=str(pods),
    )
    assert options(words) == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--node-rank": str(rank),
        "--master-addr": "qwen3vl-sft-8b-master-0",
        "--master-port": "23456",
    }
    assert words[-1] == "--save=/shared/runs/8b"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_of_a_trainjob_starts_its_part_of_the_ranks(rank: int, tmp_path: Path) -> None:
    """The environment is what the trainer's plugin for torch sets, release 2."""
    trainer = yaml.safe_load(TRAINJOB.read_text())["spec"]["trainer"]
    shell, script = trainer["command"]
    words = started(
        [shell, script.replace("/workspace", str(tmp_path)), *trainer["args"], "--dry-run"],
        tmp_path,
        PET_NNODES=str(trainer["numNodes"]),
        PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]),
        PET_NODE_RANK=str(rank),
        PET_MASTER_ADDR="qwen3vl-sft-8b-node-0-0.qwen3vl-sft-8b",
        PET_MASTER_PORT="29400",
    )
    assert options(words) == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--node-rank": str(rank),
        "--master-addr": "qwen3vl-sft-8b-node-0-0.qwen3vl-sft-8b",
        "--master-port": "29400",
    }
    assert words[-1] == "--save=/shared/runs/8b"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_of_skypilot_starts_its_part_of_the_ranks(rank: int, tmp_path: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    name, gpus = task["resources"]["accelerators"].split(":")
    words = started(
        ["bash", "-c", f"{task['run'].rstrip()} --dry-run"],
        tmp_path,
        SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NUM_GPUS_PER_NODE=gpus,
        SKYPILOT_NODE_RANK=str(rank),
        SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8",
    )
    assert options(words) == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--node-rank": str(rank),
        "--master-addr": "10.0.0.7",
        "--master-port": "29500",
    }
    assert words[-2:] == ["--save", "/shared/runs/8b"]
    assert name == "H100"


def test_a_slurm_jobs_numbers_are_slurms(tmp_path: Path) -> None:
    """A container on a Slurm cluster may come with variables of Kubeflow."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n1\n")
    scontrol.chmod(0o755)
    words = started(
        ["bash", str(LAUNCH / "sft_8b.sh"), "--dry-run"],
        tmp_path,
        PATH=f"{tmp_path}:{os.defpath}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        PET_NNODES="1",
        PET_NPROC_PER_NODE="1",
    )
    assert words[0] == "srun"
    assert [words[words.index(w) + 1] for w in ("--nnodes", "--nproc-per-node")] == ["2", "8"]
