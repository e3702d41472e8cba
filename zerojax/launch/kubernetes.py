"""Kubernetes: a manifest of pods, one for each machine, which restart together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from zerojax.launch.error import UsageError
from zerojax.launch.group import PREEMPTED
from zerojax.launch.job import Job, passed_on, supervisor_options
from zerojax.launch.local import defaults

_PORT = 8476
_SLACK_SECONDS = 30  # for the kubelet, after the launcher's grace
_WORKERS = "workers"
_INDEX = "batch.kubernetes.io/job-completion-index"
_POD = "$(POD_INDEX)"
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


class Kind(StrEnum):
    """The object that restarts pods: a JobSet all pods together; an indexed Job each separately."""

    JOBSET = "jobset"
    JOB = "job"


def manifest(
    job: Job, kind: Kind, image: str, pods: int, processes: int, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the objects of a training job.

    In each pod ``zerojax launch`` supervises the pod's processes. A pod that is preempted has
    ``job.grace`` seconds to save; status 75 restarts all pods, and is not counted as a failure.

    Args:
      job: The job to start; the script's path is its path in the image.
      kind: JobSet (whose controller the cluster must have), or a plain indexed Job.
      image: The container's image; it has Python and zerojax.
      pods: Number of pods, one for each machine.
      processes: Number of processes in each pod, and as many GPUs; CPU processes under
        ``JAX_PLATFORMS=cpu``.
      environ: Environment whose variables for JAX the pods receive.

    Raises:
      UsageError: There is no image.
    """
    if not image:
        raise UsageError("--kubernetes needs the image of the pods")
    name = _name(job)
    first_pod = f"{name}-{_WORKERS}-0-0" if kind is Kind.JOBSET else f"{name}-0"
    template = _pod(job, image, pods, processes, f"{first_pod}.{name}:{_PORT}", environ)
    exit_codes = {"operator": "In", "values": [PREEMPTED]}
    action = "FailJob" if kind is Kind.JOBSET else "Ignore"
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # One failure ends the processes of all pods; the JobSet counts its own restarts.
        "backoffLimit": 0 if kind is Kind.JOBSET else job.max_restarts * pods,
        "podFailurePolicy": {
            "rules": [
                {"action": action, "onExitCodes": exit_codes},
                {"action": action, "onPodConditions": _DISRUPTED},
            ]
        },
        "template": template,
    }
    if kind is Kind.JOBSET:
        preemption_rule = {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        jobset = {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [preemption_rule]},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": spec}}],
        }
        return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, jobset)]
    template["spec"]["subdomain"] = name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # the pods look for each other before they are ready
        "selector": {"batch.kubernetes.io/job-name": name},
    }
    return [_object("v1", "Service", name, service), _object("batch/v1", "Job", name, spec)]


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Formats the objects for ``kubectl apply -f -``."""
    return str(yaml.safe_dump_all(objects, sort_keys=False))


def _pod(
    job: Job,
    image: str,
    pods: int,
    processes: int,
    coordinator: str,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    on_gpus = environ.get("JAX_PLATFORMS") != "cpu"
    index = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}}
    variables = defaults(environ, on_gpus) | passed_on(environ)
    image_variables = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
    options = supervisor_options(job, _POD, (processes,) * pods, coordinator)
    options = [word if word == _POD else _literal(word) for word in options]
    container: dict[str, Any] = {
        "name": "train",
        "image": image,
        "command": ["python", "-m", "zerojax", "launch", *options, *map(_literal, job.script)],
        "env": [
            {"name": "POD_INDEX", **index},
            *(
                {"name": key, "value": _literal(value)}
                for key, value in variables.items()
                if key not in image_variables
            ),
        ],
        "ports": [{"containerPort": _PORT}],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace) + _SLACK_SECONDS,
        "containers": [container],
    }
    if on_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(processes)}}
        # NCCL's buffers between the GPUs of a pod: a container has 64 MB of shared memory.
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"spec": spec}


def _literal(word: str) -> str:
    """Escapes a word, so that Kubernetes replaces no ``$(NAME)`` in it."""
    return word.replace("$", "$$")


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _name(job: Job) -> str:
    """Returns the script's name as a DNS label, short enough for the suffixes of pods."""
    stem = job.script[1].rpartition(".")[2] if job.script[0] == "-m" else Path(job.script[0]).stem
    label = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"train-{label}".strip("-")
