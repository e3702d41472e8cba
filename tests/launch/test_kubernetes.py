"""Manifests, read by the types that Kubeflow made of Kubernetes' and JobSet's own schemas."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.launched import launched

from zerojax.launch.job import Job
from zerojax.launch.kubernetes import as_yaml, manifest

JOB = Job(("/app/Train_2.py", "--lr", "3"), grace=45.0, max_restarts=3)
CPU = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "/here"}


def unknown_fields(ours: Any, read: Any, place: str = "") -> Iterator[str]:
    """What a schema's types did not take, and drop without a word."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if not isinstance(read, dict) or key not in read:
                yield f"{place}.{key}"
            else:
                yield from unknown_fields(value, read[key], f"{place}.{key}")
    elif isinstance(ours, list):
        for i, value in enumerate(ours):
            yield from unknown_fields(value, read[i], f"{place}[{i}]")


def against_schema(document: dict[str, Any]) -> list[str]:
    """Unknown fields; raises where a field is missing, or of another type."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the `test` extra")
    read = models.JobsetV1alpha2JobSet.from_dict(document)
    return list(unknown_fields(document, json.loads(read.to_json())))


@pytest.mark.parametrize("environ", [{}, CPU], ids=["gpu", "cpu"])
def test_manifests_fit_their_schema(environ: dict[str, str]) -> None:
    document = yaml.safe_load(as_yaml(manifest(JOB, "image:1", 2, 8, environ)))
    assert document["kind"] == "JobSet"
    assert against_schema(document) == []


def test_words_are_the_script_s_own_whatever_kubernetes_would_put_in() -> None:
    job = Job(("/app/train.py", "$(POD_INDEX)", "$(HOME)", "$$", "a$b"))
    document = manifest(job, "image:1", 2, 8, {"XLA_FLAGS": "$(HOME)"})
    text = json.dumps(document)
    assert text.count('"$(POD_INDEX)"') == 1  # the launcher's own
    words = ["$$(POD_INDEX)", "$$(HOME)", "$$$$", "a$$b"]
    assert json.dumps(words)[1:-1] in text
    assert '"value": "$$(HOME)"' in text


def pods(environ: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Job's spec, and its pods'."""
    (replicated,) = manifest(JOB, "image:1", 2, 8, environ)["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    return spec, spec["template"]["spec"]


def test_pods_find_the_first_by_name_and_preempted_ones_are_no_failures() -> None:
    spec, pod = pods({})
    command = pod["containers"][0]["command"]
    assert command[:4] == ["python", "-m", "zerojax", "launch"]
    assert command[command.index("--coordinator") + 1] == "train-2-workers-0-0.train-2:8476"
    assert command[command.index("--node-rank") + 1] == "$(POD_INDEX)"
    assert command[-3:] == list(JOB.script)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    first, second = spec["podFailurePolicy"]["rules"]
    assert first == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [75]}}
    assert second["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 75)


def test_gpus_and_their_shared_memory_or_cpus() -> None:
    container = pods({})[1]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    container = pods(CPU)[1]["containers"][0]
    assert "resources" not in container
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert told["JAX_PLATFORMS"] == "cpu"
    assert "PYTHONPATH" not in told


def test_the_command_prints_a_manifest(tmp_path: Path) -> None:
    options = ("--kubernetes", "image:1", "--num-nodes", 2, "--nproc-per-node", 8)
    told = launched(tmp_path, "", *options)
    assert told.status == 0
    assert yaml.safe_load(told.out)["kind"] == "JobSet"
    told = launched(tmp_path, "", *options, "--slurm", "")
    assert (told.status, "--slurm and --kubernetes are both given" in told.err) == (2, True)
