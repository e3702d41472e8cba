"""`zerojax launch` if Slurm, Kubernetes or Ray places the processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.launch import kubernetes, ray, slurm
from zerojax.launch.error import UsageError
from zerojax.launch.job import Job


class Cluster(NamedTuple):
    """The options that name a cluster.

    Attributes:
      slurm: sbatch's options; None: not Slurm.
      image: Image of the pods; None: not Kubernetes.
      ray: Whether Ray Train starts the processes.
    """

    slurm: str | None
    image: str | None
    ray: bool

    def chosen(self) -> str | None:
        """Returns the option that was given, or None.

        Raises:
          UsageError: Several options were given.
        """
        given = {
            "--slurm": self.slurm is not None,
            "--kubernetes": self.image is not None,
            "--ray": self.ray,
        }
        names = [name for name, is_given in given.items() if is_given]
        if len(names) > 1:
            raise UsageError(f"give one of {' and '.join(names)}")
        return names[0] if names else None


def start(
    cluster: Cluster,
    job: Job,
    nodes: int,
    nproc_per_node: str | None,
    environ: Mapping[str, str],
    dry_run: bool,
) -> int:
    """Submits a job to the cluster, or prints the submission; returns the exit status."""
    if nproc_per_node is None or not re.fullmatch("[1-9][0-9]{0,5}", nproc_per_node):
        raise UsageError(
            f"{cluster.chosen()} needs --nproc-per-node N: how many processes, and GPUs, each "
            "machine runs"
        )
    count = int(nproc_per_node)
    if cluster.slurm is not None:
        script = slurm.batch_script(job, nodes, count, cluster.slurm, environ)
        if not dry_run:
            return slurm.submit(script, environ)
        print(script, end="")
    elif cluster.image is not None:
        jobset = kubernetes.manifest(job, cluster.image, nodes, count, environ)
        print(kubernetes.as_yaml(jobset), end="")
    elif dry_run:
        print(f"# Ray Train: {nodes * count} workers of {' '.join(job.script)}")
    else:
        return ray.run(job, nodes * count, environ)
    return 0
