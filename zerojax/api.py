"""``zerojax.zero``: one object for one config on one mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import jax
import optax
from jax.sharding import Mesh

from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.keywords import Keywords
from zerojax.config.resolved import changed_fields
from zerojax.config.resolved import resolved as resolved_text
from zerojax.devices.arranged import arranged, check_groups, check_stages
from zerojax.devices.mesh import (
    automatic,
    axis_size,
    batch_devices,
    micro_batch_devices,
    stage_size,
    zero_axis,
)
from zerojax.devices.mesh import mesh as all_devices
from zerojax.distributed import log
from zerojax.distributed.join import require_joined
from zerojax.evaluation.decorated import Evaluation
from zerojax.foresight.guard import Guard
from zerojax.monitor import lines
from zerojax.optim.named import named_optimizer
from zerojax.optim.wrap import ZeroTransformation, configured
from zerojax.placement.states import States
from zerojax.plan.state_sharding import DTYPES, Plan
from zerojax.plan.table import Summarized, Summary, first_rows
from zerojax.step.arguments import Arguments, slots
from zerojax.step.call import Further, RearrangedFunction
from zerojax.step.decorated import Decorated, P, R
from zerojax.step.per_device import per_device
from zerojax.step.sequence import SequenceAxis
from zerojax.step.train_step import Step
from zerojax.xla import compat
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree

S = TypeVar("S")

STAGES = (
    "nothing is sharded; zerojax.zero(stage=3) shards all of the state",
    "the optimizer state is sharded",
    "optimizer state and gradients are sharded",
    "optimizer state, gradients and parameters are sharded",
)
"""The arrays that each stage shards."""


class Zero(Summarized):
    """ZeRO over the devices of a mesh, configured for train steps.

    Created by :func:`zero`. Calling the object decorates a step.
    """

    def __init__(
        self,
        config: ZeroConfig,
        mesh: Mesh,
        specs: PyTree = None,
        donate: bool = True,
        check_memory: bool = True,
        params: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        self.config = config
        self.mesh: Mesh = automatic(mesh)
        axis = zero_axis(self.mesh)
        check_groups(self.mesh, config.mics_shard_size, config.words("mics_shard_size"))
        check_stages(self.mesh, config.pipeline_stages, config.words("pipeline_stages"))
        # Raises if the sizes are inconsistent.
        config.batch(micro_batch_devices(self.mesh), stage_size(self.mesh))
        config.check_partition(axis_size(self.mesh, axis))
        if config.partition_activations and self.mesh.size > batch_devices(self.mesh):
            raise ConfigError(
                "activation_checkpointing.partition_activations = true: zerojax shards no "
                f"activations over your own mesh axes ({', '.join(self.mesh.axis_names)}). Set "
                "it to false, and shard a block's input with jax.lax.with_sharding_constraint"
            )
        self.states: States = States(
            config,
            self.mesh,
            specs,
            params,
        )
        self._donate, self._check_memory = donate, check_memory

    def summary(self) -> Summary:
        """Returns the stage, the devices, the optimizer, and the fields of the config that differ
        from their defaults."""
        axes = ", ".join(f"{axis} {n}" for axis, n in self.mesh.shape.items())
        named = self.config.optimizer
        rows = [
            ("devices", f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind} ({axes})"),
            ("optimizer", "an optax transformation of yours" if named is None else named.type),
            *changed_fields(self.config),
        ]
        title = f"zerojax.zero, stage {self.config.stage}: {STAGES[self.config.stage]}"
        return Summary(title, (first_rows(rows),))

    def __call__(
        self,
        train_step: Callable[P, R],
        *,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        batch_argnames: str | Iterable[str] | None = None,
        state_argnums: int | Sequence[int] | None = None,
        frozen_argnums: int | Sequence[int] | None = None,
        batch_axis: int = 0,
    ) -> Step[P, R]:
        """Decorates a step: ``(state, batch, ...) -> (state, anything)`` with a flax
        ``TrainState``; ``(model, optimizer, batch, ...) -> anything`` with any number of NNX
        objects in any order; or a step that takes its state as any other pytrees and returns them
        among its results, such as ``(params, opt_state, batch) -> (params, opt_state, loss)``.

        Args:
          train_step: The step. A ``jax.jit`` or ``nnx.jit`` around the step is removed, and its
            static arguments stay static; any other wrapper is kept.
          static_argnums, static_argnames: The arguments that are part of the program, as for
            ``jax.jit``.
          batch_argnums, batch_argnames: The arguments that form the batch, which is checked,
            sharded and split into micro-batches as one: ``(1, 2)`` or ``("x", "y")`` for
            ``(state, x, y)``. The first argument after the state by default.
          state_argnums: The arguments that are the state, if zerojax cannot find them; by default
            the arguments that the step returns among its results.
          frozen_argnums: The arguments that are parameters which the step does not train, such as a
            teacher's. Those that are sharded are gathered where the step uses them, like the
            parameters that it trains.
          batch_axis: The dimension of the batch's arrays that has the rows: 1 for a step that scans
            over updates, whose batch is ``[steps, rows, ...]``. Pass arrays without that dimension
            as further arguments of the step; scalars may stay in the batch.

        Returns:
          The decorated step, with the signature of ``train_step``.

        Raises:
          TypeError: The step is decorated already.
          ValueError: The step has no such arguments, or its jit has an option that zerojax does
            not support.
        """
        if isinstance(train_step, Decorated):
            name = getattr(train_step, "__name__", "the step")
            raise TypeError(f"{name} is decorated with zero already: remove one of the decorators.")
        arguments = Arguments(
            train_step,
            slots(static_argnums, static_argnames),
            slots(batch_argnums, batch_argnames),
            state_argnums,
            frozen_argnums,
            batch_axis=batch_axis,
        )
        guard = Guard(self.config, self.mesh, self._other)
        return Step(arguments, self.states, self._donate, guard if self._check_memory else None)

    def evaluate(
        self,
        function: Callable[P, R],
        *,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        batch_argnames: str | Iterable[str] | None = None,
    ) -> Evaluation[P, R]:
        """Decorates a function without updates; also used as ``@zero.evaluate``.

        Parameters are gathered, cast and streamed as in a step at the same stage, so that any
        model that can be trained can be evaluated. The state is neither changed nor donated.

        A batch may have any number of rows. A batch with more rows than a micro-batch of the config
        has on all devices runs in micro-batches, and rows that do not divide among the devices are
        padded with copies that do not count. The results equal those of ``jax.jit`` on the global
        batch: results with one entry per row are returned complete and in order; sums, products,
        maxima and minima over rows are combined, and values computed from them (means, ratios,
        metrics) are computed once. A function that combines rows in another way (batch statistics,
        noise in the batch's shape) runs on the global batch at once, with a warning.

        Args:
          function: ``(state, batch, ...) -> anything`` with a flax ``TrainState``, or ``(model,
            batch, ...) -> anything`` with NNX: only the model, or also an optimizer, metrics and
            other NNX objects, in any order. Everything except parameters may change in place, as
            under ``nnx.jit``.
          static_argnums, static_argnames, batch_argnums, batch_argnames: The same as for a step.

        Example:
          >>> import jax.numpy as jnp, numpy as np, optax, zerojax
          >>> from flax.training.train_state import TrainState
          >>> zero = zerojax.zero(stage=3, bf16=True)
          >>> state = zero.init(lambda: TrainState.create(
          ...     apply_fn=None, params={"w": jnp.ones((8, 4))}, tx=optax.adam(1e-3)))
          >>> @zero.evaluate
          ... def predict(state, batch):
          ...     return batch @ state.params["w"]
          >>> predict(state, np.ones((13, 8))).shape
          (13, 4)
        """
        static, batch = slots(static_argnums, static_argnames), slots(batch_argnums, batch_argnames)
        arguments = Arguments(function, static, batch, returns_state=False)
        return Evaluation(arguments, self.states)

    def _other(
        self,
        config: ZeroConfig,
        function: RearrangedFunction,
        objects: tuple[PyTree, ...],
        batch: PyTree,
        further: Further,
    ) -> tuple[Plan, Callable[[], Iterable[LoweredProgram]]]:
        """Returns the plan and the programs of a step under another config on these devices."""
        other = Zero(config, self.mesh, self.states.specs, self._donate, params=self.states.params)
        if len(objects) == 1:  # memory is short: do not copy a state
            objects = jax.eval_shape(lambda state: state, objects)
        n = len(objects)
        step = other(
            function,
            state_argnums=range(n),
            batch_argnums=n,
            batch_axis=function.signature.batch_axis,
        )
        return other.plan(*objects), lambda: step.programs(*objects, batch, *further)

    @compat.with_short_traceback
    def init(self, create_state: Callable[..., S], *args: object) -> S:
        """Creates a state whose arrays are sharded from the start.

        Args:
          create_state: ``create_state(*args)`` returns a ``TrainState``; a tuple of an
            ``nnx.Module``, its ``nnx.Optimizer`` and further NNX objects (metrics, ``nnx.Rngs``) in
            any order; or any other pytree of arrays. It runs under ``jit``.
          *args: Usually a PRNG key. Arrays are traced; numbers, models and configs are static.

        Returns:
          The state, placed on the mesh as planned, with its optimizer wrapped for the config.
        """
        state: S = self.states.init(create_state, *args)
        return state

    @compat.with_short_traceback
    def abstract_state(self, create_state: Callable[..., S], *args: object) -> S:
        """Returns the state of :meth:`init` as ``jax.ShapeDtypeStruct`` with shardings, for
        ``train_step.lower`` and for orbax to restore into. Touches no device."""
        state: S = self.states.abstract(create_state, *args)
        return state

    @compat.with_short_traceback
    def plan(self, *state: PyTree) -> Plan:
        """Returns the sharding of a state over the devices, with the reasons.

        Args:
          *state: A ``TrainState``, NNX objects as :meth:`init` returns them (or their tuple), or
            another pytree; concrete or abstract.

        Returns:
          A plan with trees of ``PartitionSpec`` as ``params``, ``grads``, ``opt_state``; its
          ``str()`` is a table with bytes per device and reasons.
        """
        objects = state[0] if len(state) == 1 and type(state[0]) is tuple else state
        return self.states.plan(self.states.open(tuple(objects)))

    def optimizer(self, *, weight_decay_mask: PyTree = None) -> ZeroTransformation:
        """Returns the config's optimizer with schedule, clipping and loss scale, for optax.

        Args:
          weight_decay_mask: The parameters to which weight decay applies, as for optax: a tree of
            bools with the structure of the parameters, or a function from the parameters to such a
            tree. None leaves the choice to the config.

        Raises:
          ConfigError: The config names no optimizer.
        """
        config = self.config
        if config.optimizer is None:
            raise ConfigError(
                'optimizer: the config has none. Add {"optimizer": {"type": "AdamW", "params": '
                '{"lr": 1e-3}}}, or pass an optax transformation to TrainState.create.'
            )
        tx, learning_rate = named_optimizer(
            config.optimizer,
            config.scheduler,
            weight_decay_mask=weight_decay_mask,
            compute_dtype=DTYPES[config.compute_dtype],
        )
        return configured(tx, config, learning_rate)

    def wrap(self, tx: optax.GradientTransformation) -> ZeroTransformation:
        """Wraps the user's optax transformation with the config's clipping and telemetry."""
        return self.states.wrap(tx)

    @property
    def sequence(self) -> SequenceAxis | None:
        """The mesh's axis "seq", which shards rows along their tokens, for models that attend over
        all tokens; None if the mesh has no such axis.

        Example:
          >>> import jax.numpy as jnp, zerojax
          >>> zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"data": 2, "seq": 4}))
          >>> def attention(q, k, v):  # [B, T, H, d]
          ...     return jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", q, k), v)
          >>> q = jnp.ones((2, 8, 4, 2))
          >>> out = zero.sequence.attention(attention)(q, q, q)
          >>> out.addressable_shards[0].data.shape  # tokens are cut again
          (1, 2, 4, 2)
        """
        return SequenceAxis.of(self.states.mesh)

    def per_device(
        self,
        function: Callable[..., R],
        *,
        replicated: Collection[int] = (),
        sharded: Mapping[str, int] | None = None,
    ) -> Callable[..., R]:
        """Returns ``function`` such that each device runs it on its own rows of a batch.

        A decorated step is written for the global batch, and XLA partitions the work. Use this
        method for a function that XLA cannot partition, such as a kernel of ``pallas_kernels``;
        the step may differentiate the result. Gradients of ``replicated`` arguments are summed over
        the devices.

        Args:
          function: A function of arrays (or trees of them) [rows of the batch, ...] that returns
            such arrays; a row's results must not depend on other rows.
          replicated: Positions of the arguments that are replicated: weights, scalars.
          sharded: Mesh axes other than those of the batch, and the dimension that each axis shards,
            in all results and in those arguments, not replicated, that have the dimension:
            ``{"model": 2}`` for the heads of attention [B, T, H, d] under tensor parallelism.

        Raises:
          ValueError: On a call, a first dimension, or a dimension of ``sharded``, does not divide
            among the devices; ``sharded`` names an axis that the mesh lacks, or one of the batch.

        Example:
          >>> import jax.numpy as jnp, pallas_kernels, zerojax
          >>> zero = zerojax.zero(stage=3)
          >>> norm = zero.per_device(pallas_kernels.rms_norm, replicated=[1])
          >>> norm(jnp.ones((8, 4)), jnp.full(4, 2.0)).shape
          (8, 4)
        """
        return per_device(function, self.states.mesh, replicated, sharded or {})


def zero(
    config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    specs: PyTree = None,
    params: Callable[[PyTree], PyTree] | None = None,
    donate: bool = True,
    auto: Mapping[str, Any] | None = None,
    check_finite: bool | None = None,
    accumulate_statistics: bool | None = None,
    check_memory: bool = True,
    **keywords: Unpack[Keywords],
) -> Zero:
    """Reads a config and returns the decorator of a train step.

    Args:
      config: A DeepSpeed JSON (or HJSON) or the YAML of ``accelerate config``, as a path or a dict,
        with DeepSpeed's defaults; or a :class:`ZeroConfig`.
      mesh: The devices; by default all devices on one "data" axis, in replica groups if the config
        has ``mics_shard_size``, and in pipeline stages, on an outermost axis "stage", if it has
        ``pipeline.stages``. ZeRO shards over "data", or over "data" and "seq" together if the mesh
        has the axis "seq", which shards rows along their tokens. The batch is also sharded over
        "replica" and "stage"; other axes are the user's.
      specs: The user's ``PartitionSpec`` for parameters, as a tree or a prefix of a tree, or a
        function from the parameters to either, if the model does not carry specs itself (flax
        partitioning metadata, logical or not), or to replace the model's specs:
        ``PartitionSpec()`` leaves all parameters to ZeRO. Copies of the parameters, as moments and
        averages are, have their specs.
      params: A function from the state to its parameters, a subtree, for a state that is neither a
        ``TrainState`` nor NNX objects: ``lambda state: state[0]`` for the arguments ``(params,
        opt_state)`` of a step. ``specs``, half precision, offload and ZeRO++ require the function
        if no single part of the state has the structure of the optimizer's moments.
      donate: Whether to reuse the memory of the state passed to the step, which invalidates that
        state, as with ``jax.jit(donate_argnums=0)``.
      auto: Values for each "auto" of the config that only the program knows, by dotted key:
        ``{"scheduler.params.total_num_steps": 300}``.
      check_finite: Whether to skip updates whose gradient is not finite, at any precision, with
        ``config`` or with keywords: parameters and optimizer state stay unchanged, and
        ``telemetry(state)["skipped_steps"]`` counts the step. ``fp16`` always checks, and so does
        ``bf16`` in a DeepSpeed JSON unless ``check_grad_overflow`` is false; DeepSpeed has no
        such key for fp32. None leaves the choice to the config, where the check is off by default.
      accumulate_statistics: Whether each micro-batch may compute statistics of its own rows that
        the state keeps (BatchNorm, the centre of DINO), with ``config`` or with keywords. Their
        numbers, and the gradients, are not those of the global batch. None leaves the choice to the
        config, where such a step is refused by default.
      check_memory: Whether to compile a step before its first run, and to raise
        :class:`zerojax.OutOfMemoryError`, with settings that fit, if the step needs more memory
        than the devices have free. False runs the step and leaves that error to XLA. On devices
        that do not report their free memory (CPUs) nothing is checked.
      **keywords: The fields of :class:`ZeroConfig` in place of ``config``; features without a
        field stay off.

    Raises:
      ConfigError: Names the key, its value and the remedy.

    Example:
      >>> import zerojax
      >>> zero = zerojax.zero(stage=3, bf16=True)
      >>> @zero
      ... def train_step(state, batch):
      ...     ...
    """
    if callable(config):
        name = getattr(config, "__name__", type(config).__name__)
        raise TypeError(
            f"zerojax.zero got {name} as its config (a path, a mapping or a ZeroConfig): write "
            f"@zerojax.zero(stage=3), or zerojax.zero(config)({name})."
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}: write "
            'mesh=zerojax.mesh(8), or mesh=zerojax.mesh(axes="data=4,model=2")'
        )
    if config is not None and keywords:
        raise ConfigError(f"{', '.join(keywords)}: pass a config or keywords, not both.")
    if config is None and auto:
        raise ConfigError(f"auto: there is no config with {', '.join(auto)}; pass one.")
    resolved = ZeroConfig.from_keywords(**keywords) if config is None else load(config, auto=auto)
    if keywords and "stage" not in keywords:
        shown = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        log.warning(
            "zerojax.zero(%s) has no stage, and at stage 0 nothing is sharded: write "
            "zerojax.zero(stage=3, %s), or stage=0.",
            *(shown, shown),
        )
    both = {"check_finite": check_finite, "accumulate_statistics": accumulate_statistics}
    given: dict[str, Any] = {name: value for name, value in both.items() if value is not None}
    if given:
        notes = tuple(note for note in resolved.notes if note.key not in given)
        resolved = dataclasses.replace(resolved, **given, notes=notes)
    if resolved.autotuning:
        raise ConfigError(
            "autotuning.enabled = true: a step does not tune. Run `python -m zerojax fit "
            "--config CONFIG --model NAME --devices KIND:N --out FILE` and train with FILE, or "
            "set enabled to false"
        )
    devices = arranged(all_devices(), resolved) if mesh is None else mesh
    if devices.devices.flat[0].addressable_memories():  # a topology has no other process
        require_joined()
    result = Zero(resolved, devices, specs, donate, check_memory, params)
    if resolved.dump_state and log.is_first():
        lines.say(f"config:\n{resolved_text(resolved, micro_batch_devices(result.mesh))}")
    return result
