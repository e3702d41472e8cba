"""Meshes divided into the pipeline stages and replica groups of a config."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from zerojax.config import ConfigError, ZeroConfig
from zerojax.config.batch import devices_of_stage
from zerojax.devices.mesh import (
    AXIS,
    REPLICA,
    STAGE,
    automatic,
    axis_size,
    batch_devices,
    sequence_size,
    shard_axis,
    stage_size,
    zero_axis,
)

_MICS = "zero_optimization.mics_shard_size"


def arranged(given: Mesh, config: ZeroConfig) -> Mesh:
    """Divides the shard axis of ``given`` into the pipeline stages and replica groups of a config.

    Raises:
      ConfigError: The stages or groups do not divide the devices.
    """
    given = in_stages(given, config.pipeline_stages, config.words("pipeline_stages"))
    return in_groups(given, config.mics_shard_size, config.words("mics_shard_size"))


def in_stages(given: Mesh, stages: int | None, words: str = "") -> Mesh:
    """Divides the shard axis of ``given`` into pipeline stages, outermost, of neighbours, if the
    mesh has no such axis yet; None and 1 leave the mesh unchanged.

    Args:
      stages: ``pipeline.stages`` of the config.
      words: the config's key and value, for a message.

    Raises:
      ConfigError: the stages do not divide the devices.
    """
    if stages is None or stages == 1 or STAGE in given.axis_names:
        return given
    at = given.axis_names.index(shard_axis(given))
    shape = list(given.devices.shape)
    size = devices_of_stage(shape[at], stages, words)
    devices = given.devices.reshape(*shape[:at], stages, size, *shape[at + 1 :])
    names = (*given.axis_names[:at], AXIS, *given.axis_names[at + 1 :])
    return automatic(Mesh(np.moveaxis(devices, at, 0), (STAGE, *names)))


def check_stages(given: Mesh, stages: int | None, words: str = "") -> None:
    """Refuses a mesh with another number of pipeline stages; arguments as for :func:`in_stages`.

    Raises:
      ConfigError: with both numbers.
    """
    if stages is None or stages == (found := stage_size(given)):
        return
    axis, sizes = shard_axis(given), dict(given.shape)
    data = devices_of_stage(found * sizes[axis], stages, words)
    raise ConfigError(
        f"{words or f'pipeline.stages = {stages}'}, and the mesh {sizes} has "
        f"{found if found > 1 else 'no'} pipeline stages: remove one of them, or make the mesh "
        f"with zerojax.mesh(axes={ {STAGE: stages} | sizes | {STAGE: stages, axis: data} })"
    )


def in_groups(given: Mesh, size: int, words: str = "") -> Mesh:
    """Divides the shard axis of ``given`` into replica groups of ``size`` neighbours, if the mesh
    has no replica groups yet; -1 and 0 leave the mesh unchanged.

    Args:
      size: ``mics_shard_size`` of the config.
      words: the config's key and value, for a message.

    Raises:
      ConfigError: the groups do not divide the devices.
    """
    if size < 1 or REPLICA in given.axis_names:
        return given
    axis, shared = shard_axis(given), sequence_size(given)
    at, devices = given.axis_names.index(axis), given.shape[axis]
    if devices * shared % size or size % shared:
        fits = [n * shared for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            f"{words or f'{_MICS} = {size}'} does not divide the {devices * shared} devices of "
            f"the axis {zero_axis(given)!r} into equal groups: write one of {fits}"
        )
    size //= shared
    shape, names = given.devices.shape, given.axis_names
    return automatic(
        Mesh(
            given.devices.reshape(*shape[:at], devices // size, size, *shape[at + 1 :]),
            (*names[:at], REPLICA, AXIS, *names[at + 1 :]),
        )
    )


def check_groups(given: Mesh, size: int, words: str = "") -> None:
    """Refuses a mesh whose shard groups do not have ``size``; arguments as for :func:`in_groups`.

    Raises:
      ConfigError: with both sizes.
    """
    devices = axis_size(given, zero_axis(given))
    if 0 < size != devices:
        raise ConfigError(
            f"{words or f'{_MICS} = {size}'}, and the mesh {dict(given.shape)} has shard groups "
            f"of {devices} ({zero_axis(given)!r}): remove one of them, or make the mesh with "
            f"zerojax.mesh(replicas={max(1, batch_devices(given) // size)})"
        )
