"""Kubernetes: a manifest of pods, one for each machine, which restart together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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


def manifest(
    job: Job, image: str, pods: int, processes: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the JobSet of a training job.

    In each pod ``zerojax launch`` supervises the pod's processes. A pod that is preempted has
    ``job.grace`` seconds to save; status 75 restarts all pods, and is not counted as a failure.

    Args:
      job: The job to start; the script's path is its path in the image.
      image: The container's image; it has Python and zerojax.
      pods: Number of pods, one for each machine.
      processes: Number of processes in each pod, and as many GPUs; CPU processes under
        ``JAX_PLATFORMS=cpu``.
      environ: Environment whose variables for JAX the pods receive.

    Raises:
      UsageError: There is no image.
    """
    if not image:
        raise UsageError("--kubernetes needs an image: --kubernetes IMAGE")
    name = _name(job)
    first_pod = f"{name}-{_WORKERS}-0-0.{name}:{_PORT}"
    exit_codes = {"operator": "In", "values": [PREEMPTED]}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,  # one failure ends the processes of all pods; the JobSet counts restarts
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": exit_codes},
                {"action": "FailJob", "onPodConditions": _DISRUPTED},
            ]
        },
        "template": _pod(job, image, pods, processes, first_pod, environ),
    }
    preemption_rule = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [preemption_rule]},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def as_yaml(jobset: dict[str, Any]) -> str:
    """Formats a JobSet for ``kubectl apply -f -``."""
    return str(yaml.safe_dump(jobset, sort_keys=False))


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


def _name(job: Job) -> str:
    """Returns the script's name as a DNS label, short enough for the suffixes of pods."""
    stem = job.script[1].rpartition(".")[2] if job.script[0] == "-m" else Path(job.script[0]).stem
    label = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"train-{label}".strip("-")
