"""``zerojax.init_distributed``: the processes that were launched together become one job of JAX."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig, load
from zerojax.distributed.exchange import exchange
from zerojax.distributed.failure import end_at_once, leave
from zerojax.distributed.launched import Launched, LaunchError, launched
from zerojax.distributed.preflight import (
    config_hash,
    cpu_warnings,
    describe,
    devices_here,
    differences,
    is_loopback,
    local_devices,
    unequal_configs,
    unequal_devices,
    unreachable,
)
from zerojax.distributed.roll_call import by_host, call_roll, split
from zerojax.xla import compat


def init_distributed(
    config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig | None = None,
    *,
    timeout: float = 300.0,
    heartbeat: float = 30.0,
) -> None:
    """Joins the processes that were launched together, each of which calls this function first.

    The function finds out from the environment how the process was launched: by ``python -m
    zerojax launch``, srun, mpirun, torchrun, Kubernetes or Ray. In a process of its own it does
    nothing, and neither does a second call. Before and after JAX joins the processes, their
    versions, configs and devices are compared; what does not fit is the same error in all.

    JAX's backends are started: options of JAX (``jax.config``) are set before. An exception that
    ends one of several processes ends that process at once, with status 1, and does not wait for
    the others in JAX's shutdown.

    Args:
      config: The config of :func:`zerojax.zero`, where the program knows it this early: all
        processes must have the same.
      timeout: Seconds to wait for the other processes.
      heartbeat: Seconds of silence after which JAX takes a process for dead and ends the others.

    Raises:
      LaunchError: What is missing or does not fit, with the processes and the remedy.

    Example:
      >>> import zerojax
      >>> zerojax.init_distributed()  # the only process: nothing happens
    """
    me = launched(os.environ)
    if me is None or jax.distributed.is_initialized():
        leave("joined", 0 if me is None else me.index)
        return
    end_at_once(me.index)
    if compat.backends_are_initialized():
        raise LaunchError(
            f"this is process {me.index} of {me.count}, and JAX is in use already: call "
            "zerojax.init_distributed() at the top of the program, before jax.devices(), arrays, "
            "and imports that make arrays"
        )
    if problem := unreachable(me):
        raise LaunchError(f"process {me.index} of {me.count}: {problem}")
    bind = _bind(me)
    mine = describe(me, None if config is None else load(config), os.environ)
    records = call_roll(me, mine, bind, timeout)
    _refuse(differences(records, me.coordinator))
    here = by_host(records)[mine["host"]]
    if jax.config.jax_cpu_collectives_implementation is None:  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        me.coordinator,
        me.count,
        me.index,
        local_device_ids=local_devices([records[n] for n in here])[here.index(me.index)],
        cluster_detection_method="deactivate",  # which would take one GPU a process anyhow
        initialization_timeout=60,  # all were there just now
        heartbeat_timeout_seconds=round(heartbeat),
        coordinator_bind_address=bind,
    )
    devices = json.dumps(devices_here(jax.local_devices()))
    told = exchange("the devices of each process", devices, timeout)
    _refuse(unequal_devices([json.loads(each) for each in told]))
    if me.index == 0:
        for each in cpu_warnings(records):
            warnings.warn(f"zerojax: {each}", stacklevel=2)
    leave("joined", me.index)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise LaunchError("the processes do not fit together:\n  " + "\n  ".join(problems))


def _bind(me: Launched) -> str:
    """Where process 0 listens: at a loopback address where no other host is to come."""
    host, port = split(me.coordinator)
    alone = host == "localhost" or me.local_count == me.count
    if alone and is_loopback(host):
        address = socket.getaddrinfo(host, port, socket.AF_INET)[0][4][0]
        return f"{address}:{port}"
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")


def require_joined() -> None:
    """Refuses to run as one of several processes that know nothing of each other.

    Raises:
      LaunchError: The environment is that of several processes, and JAX has not joined them.
    """
    if jax.distributed.is_initialized():
        return
    me = None
    with suppress(LaunchError):  # half an environment: perhaps of something else
        me = launched(os.environ)
    if me is not None:
        raise LaunchError(
            f"{me.by} started {me.count} processes, and this one, number {me.index}, has not "
            "joined the others: call zerojax.init_distributed() at the top of the program"
        )


def require_same(config: ZeroConfig, mesh: Mesh) -> None:
    """Refuses configs that differ between the processes of a mesh of all of them.

    Raises:
      LaunchError: In all processes, with those that differ.
    """
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count() > 1:
        _refuse(unequal_configs(exchange("the config", config_hash(config), 300.0)))
