"""Trials of a model on a mesh, under different settings.

study = Study(function, config, mesh, rates("h100"), rows=64, seq=1024)
study.forecast(study.given).fits
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from zerojax.api import Zero, zero
from zerojax.config import OffloadParam, ZeroConfig
from zerojax.config.frozen import quiet
from zerojax.devices.arranged import arranged
from zerojax.devices.mesh import (
    AXIS,
    SEQUENCE,
    STAGE,
    batch_axes,
    laid_out,
    micro_batch_devices,
)
from zerojax.devices.network import nodes_of
from zerojax.devices.rates import Rates
from zerojax.foresight.choice import Choice, Remat, requested_rows
from zerojax.foresight.costs import Measure, measure
from zerojax.foresight.trials import BuiltStep, Trials
from zerojax.models.registry import bound, takes
from zerojax.models.tensor_parallel import MODEL
from zerojax.plan import layout
from zerojax.plan.state_sharding import Plan
from zerojax.step.collectives_table import CollectivesTable
from zerojax.step.train_step import Step
from zerojax.tuning.workload import Workload, workload
from zerojax.xla.types import PyTree


class Study(Trials):
    """The trials of a model's step on a mesh.

    Parameters on disk are forecast as if they were in host memory.

    Args:
      function: A function that returns a flax model or a workload, see
        :mod:`zerojax.models.registry`.
      config: The config; a choice changes some of its settings.
      mesh: The devices, which need not exist.
      rates: The speeds and the memory of the devices.
      rows: Rows of a batch over all devices; None for the config's number, or one per device if
        the config has none.
      seq: Tokens in a row.
      remat: What rematerialised blocks keep, for functions that take ``remat``, and for the name of
        a policy ``remat_policy``.
      note: A function called with the description of each choice before it is compiled.
      measured: A function that measures a program, as :func:`zerojax.foresight.costs.measure`.

    Attributes:
      given: The choice that the config describes.

    Raises:
      ConfigError: The rows do not divide among the devices as the config requires.
    """

    world: int

    def __init__(
        self,
        function: Callable[..., object],
        config: ZeroConfig,
        mesh: Mesh,
        rates: Rates,
        *,
        rows: int | None,
        seq: int,
        remat: Remat = None,
        note: Callable[[str], None] = lambda text: None,
        measured: Measure = measure,
    ) -> None:
        self._function, self._config, self._seq = function, quiet(config), seq
        self._mesh = arranged(mesh, config)
        self.world = micro_batch_devices(self._mesh)
        has_remat = takes(function, "remat")
        sizes = config.batch(self.world)
        rows = (
            requested_rows(rows, sizes.train)
            or (sizes.micro or 1) * sizes.accumulation * self.world
        )
        default_choice = Choice.of(
            config, rows, self.world, (remat or False) if has_remat else None
        )
        super().__init__(self._from_model, default_choice, rates, note, measured)

    @property
    def pipelines(self) -> list[int]:
        """The numbers of pipeline stages that divide the hosts; none with other axes than
        ZeRO's."""
        hosts = len({*nodes_of(self._mesh)})
        if self._mesh.axis_names != (AXIS,):
            return []
        return [n for n in range(2, hosts + 1) if hosts % n == 0]

    def collectives(self, choice: Choice) -> CollectivesTable:
        """Returns the collectives that zerojax chooses for a choice's step; compiles nothing."""
        _, step, step_args, _ = self._step(choice)
        return step.collectives(*step_args)

    def _from_model(self, choice: Choice) -> BuiltStep:
        plan, step, step_args, tokens = self._step(choice)
        names = functools.partial(step.recomputed_names, *step_args)
        return BuiltStep(plan, functools.partial(step.programs, *step_args), tokens, names)

    def _step(self, choice: Choice) -> tuple[Plan, Step[..., PyTree], tuple[PyTree, ...], int]:
        """Returns the plan of a choice's state, its step, the step's arguments, and its tokens."""
        config = choice.config(self._config, self.world)
        if config.offload_param and config.offload_param.device == "nvme":
            # A program that reads a disk cannot be compiled for absent devices. In both cases a
            # parameter passes through host memory on its way to the device.
            config = dataclasses.replace(config, offload_param=OffloadParam())
        mesh, rows = self._mesh, choice.rows(self.world)
        if (n := choice.pipeline) > 1:
            mesh = laid_out(mesh, {STAGE: n, AXIS: mesh.size // n})
        decorated, work, objects = abstract_workload(
            self._function, config, mesh, rows, self._seq, choice.remat
        )
        step = decorated(work.train_step)
        step_args = (*objects, work.batch, *work.args)
        return decorated.plan(*objects), step, step_args, work.tokens


def abstract_workload(
    function: Callable[..., object],
    config: ZeroConfig,
    mesh: Mesh,
    rows: int,
    seq: int,
    remat: Remat = None,
) -> tuple[Zero, Workload, tuple[PyTree, ...]]:
    """Returns the decorator for a model's workload, the workload, and its abstract state.

    Args:
      function, seq, remat: As for :class:`Study`.
      config: The config of the decorator.
      mesh: The devices of the decorator.
      rows: Rows of a batch over all devices.

    Raises:
      ValueError: An axis of the mesh shards neither the batch nor the model.
    """
    decorated = zero(config, mesh=mesh)
    options = {
        "zero": decorated,
        "rows": rows,
        "seq": seq,
        "remat": bool(remat),
        "remat_policy": remat if isinstance(remat, str) else None,
    }
    work = workload(bound(function, options), decorated, rows, seq)
    if work.specs is not None:
        decorated = zero(config, mesh=mesh, specs=work.specs)
    state = decorated.abstract_state(work.create_state, jax.random.key(0))
    objects = state if isinstance(state, tuple) else (state,)
    plan = decorated.plan(*objects)
    own_axes = {axis for x in plan.leaves["params"] for e in x.own_spec for axis in layout.axes(e)}
    for axis, size in plan.mesh.shape.items():
        if size > 1 and axis not in {*own_axes, *batch_axes(plan.mesh), SEQUENCE}:
            raise ValueError(
                f"no parameter is sharded over the mesh axis {axis!r}: use {MODEL!r} for the GPTs "
                "and Llamas of zerojax, or return zerojax.Workload(..., specs=...)"
            )
    return decorated, work, objects
