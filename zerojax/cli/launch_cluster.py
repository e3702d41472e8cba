"""`zerojax launch` if Slurm or Kubernetes places the processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.launch import kubernetes, slurm
from zerojax.launch.error import UsageError
from zerojax.launch.job import Job


class Cluster(NamedTuple):
    """The options that name a cluster.

    Attributes:
      slurm: sbatch's options; None: not Slurm.
      image: Image of the pods; None: not Kubernetes.
    """

    slurm: str | None
    image: str | None

    def chosen(self) -> str | None:
        """Returns the option that was given, or None.

        Raises:
          UsageError: Several options were given.
        """
        if self.slurm is not None and self.image is not None:
            raise UsageError("--slurm and --kubernetes are both given: remove one")
        if self.slurm is not None:
            return "--slurm"
        return None if self.image is None else "--kubernetes"


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
        raise UsageError(f"{cluster.chosen()} needs --nproc-per-node, for each machine")
    count = int(nproc_per_node)
    if cluster.slurm is not None:
        script = slurm.batch_script(job, nodes, count, cluster.slurm, environ)
        if not dry_run:
            return slurm.submit(script, environ)
        print(script, end="")
    else:
        assert cluster.image is not None
        jobset = kubernetes.manifest(job, cluster.image, nodes, count, environ)
        print(kubernetes.as_yaml(jobset), end="")
    return 0
