"""``zerojax.init_distributed``: joins processes that were launched together into one JAX job."""

from __future__ import annotations

import atexit
import faulthandler
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig, load
from zerojax.distributed.addresses import avoid_proxy, where_to_listen
from zerojax.distributed.exchange import exchange
from zerojax.distributed.failure import end_at_once, leave
from zerojax.distributed.gpus import local_devices
from zerojax.distributed.launched import LaunchError, launched
from zerojax.distributed.preflight import (
    describe,
    devices_here,
    differences,
    settings,
    unequal_devices,
    unequal_settings,
)
from zerojax.distributed.ray_train import ray_train_variables
from zerojax.distributed.roll_call import by_host, call_roll
from zerojax.distributed.watchdog import watchdog
from zerojax.xla import compat


def init_distributed(
    config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig | None = None,
    *,
    timeout: float = 300.0,
    heartbeat: float = 30.0,
) -> None:
    """Joins processes that were launched together; each calls this function before any other.

    The function detects from the environment how the process was launched: by ``python -m
    zerojax launch``, srun, mpirun, torchrun, Kubernetes or Ray. In a single process the function
    does nothing, and neither does a second call. Before and after JAX joins the processes, their
    versions, configs and devices are compared; a mismatch raises the same error in all processes.

    The function starts JAX's backends: set options of JAX (``jax.config``) before. An exception
    that ends one of several processes ends that process at once, with status 1, and does not wait
    for the others; a process whose script has ended waits for the scripts of the others.

    Args:
      config: The config of :func:`zerojax.zero`, if the program knows it this early; it must be the
        same in all processes.
      timeout: Seconds to wait for the other processes.
      heartbeat: Seconds of silence after which JAX considers a process dead and ends the others.

    Raises:
      LaunchError: Something is missing or does not fit; the message names the processes and the
        remedy.

    Example:
      >>> import zerojax
      >>> zerojax.init_distributed()  # the only process: nothing happens
    """
    if jax.distributed.is_initialized():
        _leave_joined(jax.process_index())
        return
    me = launched({**os.environ, **ray_train_variables()})
    if me is None:
        leave("joined", 0)
        return
    end_at_once(me.index, me.count)
    faulthandler.enable()  # JAX aborts processes whose peers are missing
    if compat.backends_are_initialized():
        raise LaunchError(
            f"JAX is in use already in process {me.index} of {me.count}: call "
            "zerojax.init_distributed() before jax.devices() and imports that make arrays"
        )
    bind = where_to_listen(me)
    own_record = describe(None if config is None else load(config), os.environ)
    records = call_roll(me, own_record, bind, timeout)
    _refuse(differences(records))
    local = by_host(records)[own_record["host"]]
    if jax.config.jax_cpu_collectives_implementation is None:  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's SIGTERM handler only records the signal; without ``Preemption`` it must end a process.
    jax.config.update("jax_enable_preemption_service", False)
    avoid_proxy(me.coordinator, os.environ)
    jax.distributed.initialize(
        me.coordinator,
        me.count,
        me.index,
        local_device_ids=local_devices([records[n] for n in local])[local.index(me.index)],
        cluster_detection_method="deactivate",  # detection would take one GPU a process
        initialization_timeout=60,  # all processes have just answered
        heartbeat_timeout_seconds=round(heartbeat),
        coordinator_bind_address=bind,
    )
    devices = devices_here(jax.local_devices())
    _refuse(unequal_devices(exchange("the devices of each process", devices, timeout)))
    _leave_joined(me.index)
    watchdog()


def _leave_joined(index: int) -> None:
    """Tells the launcher that this process has joined, and later that its script has ended."""
    leave("joined", index)
    atexit.register(leave, "ended", index)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise LaunchError("the processes do not fit together:\n  " + "\n  ".join(problems))


def require_joined() -> None:
    """Refuses to run as one of several processes that JAX has not joined.

    Raises:
      LaunchError: A launcher started several processes, and JAX has not joined them.
    """
    if jax.distributed.is_initialized():
        return
    me = None
    with suppress(LaunchError):  # an incomplete environment may be for another program
        me = launched(os.environ)
    if me is not None:
        raise LaunchError(
            f"{me.by} started {me.count} processes, and number {me.index} has not joined: call "
            "zerojax.init_distributed() at the top of the program"
        )


def require_same(config: ZeroConfig, mesh: Mesh) -> None:
    """Refuses configs that differ between processes, if the mesh spans all processes.

    Raises:
      LaunchError: Configs differ; raised in all processes, with the fields that differ.
    """
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count() > 1:
        _refuse(unequal_settings(exchange("the config", settings(config), 300.0)))
