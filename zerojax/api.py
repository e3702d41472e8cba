"""``zerojax.zero``: one object for one config on one mesh."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.resolved import resolved as resolved_text
from zerojax.devices.mesh import (
    automatic,
    axis_size,
    batch_devices,
    check_groups,
    in_groups,
    zero_axis,
)
from zerojax.devices.mesh import mesh as all_devices
from zerojax.distributed import log
from zerojax.distributed.join import require_joined
from zerojax.evaluation.evaluation import Evaluation
from zerojax.foresight.guard import Guard
from zerojax.monitor import lines
from zerojax.optim.named import named_optimizer
from zerojax.optim.wrap import ZeroTransformation, features, wrap
from zerojax.placement.states import States
from zerojax.plan.plan import Plan
from zerojax.step.arguments import Arguments
from zerojax.step.decorated import P, R
from zerojax.step.per_device import per_device
from zerojax.step.sequence import SequenceAxis
from zerojax.step.step import Step


class Zero:
    """ZeRO for a train step, as a config asks, over the devices of a mesh.

    Made by :func:`zero`. Calling it decorates a step.
    """

    def __init__(
        self,
        config: ZeroConfig,
        mesh: Mesh,
        specs: Any = None,
        donate: bool = True,
        check_memory: bool = True,
        params: Callable[[Any], Any] | None = None,
    ) -> None:
        self.config = config
        self.mesh = automatic(mesh)
        axis = zero_axis(self.mesh)
        check_groups(self.mesh, config.mics_shard_size, config.words("mics_shard_size"))
        config.batch(batch_devices(self.mesh))  # a triangle that does not multiply out fails here
        config.check_partition(axis_size(self.mesh, axis))
        if config.partition_activations and self.mesh.size > batch_devices(self.mesh):
            raise ConfigError(
                "activation_checkpointing.partition_activations = true: this mesh has axes of your "
                f"own ({', '.join(self.mesh.axis_names)}), over which zerojax cuts no activations; "
                "cut a block's input yourself, with jax.lax.with_sharding_constraint, and set the "
                "key to false"
            )
        self.states = States(config, self.mesh, axis, specs, params)
        self._donate, self._check_memory = donate, check_memory

    def __call__(
        self,
        train_step: Callable[P, R],
        *,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        state_argnums: int | Sequence[int] | None = None,
        batch_axis: int = 0,
    ) -> Step[P, R]:
        """Decorates a step: ``(state, batch, ...) -> (state, anything)`` with a flax
        ``TrainState``; ``(model, optimizer, batch, ...) -> anything`` with any number of NNX
        objects in any order; or a step of any other pytrees that comes back among its results,
        such as ``(params, opt_state, batch) -> (params, opt_state, loss)``.

        Args:
          train_step: The step. A ``jax.jit`` or ``nnx.jit`` around the step is taken off, and its
            static arguments stay static; any other wrapper runs as it is.
          static_argnums, static_argnames: The arguments that are part of the program, as for
            ``jax.jit``.
          batch_argnums: The arguments that are the batch, checked, laid out and divided together:
            ``(1, 2)`` for ``(state, x, y)``. The first argument after the state by default.
          state_argnums: The arguments that are the state, where they cannot be found: by default
            those that come back among the results.
          batch_axis: The dimension of the batch's arrays that has the rows: 1 for a step that scans
            over updates, whose batch is ``[steps, rows, ...]``. Arrays without that dimension are
            further arguments of the step; numbers may stay.

        Returns:
          The decorated step, with the signature of ``train_step``.

        Raises:
          ValueError: The step has no such arguments, or its jit has an option that zerojax cannot
            follow.
        """
        arguments = Arguments(
            train_step,
            static_argnums,
            static_argnames,
            batch_argnums,
            state_argnums,
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
    ) -> Evaluation[P, R]:
        """A function without updates, computed as a step computes: also ``@zero.evaluate``.

        Parameters are gathered, cast and streamed as in a step at the same stage, so that what can
        be trained can be evaluated. The state is neither changed nor used up.

        A batch may have any number of rows. One of more rows than a micro-batch of the config has
        on all devices is run in micro-batches, and rows that do not divide among the devices are
        filled up with copies that do not count. The results are those of ``jax.jit`` on the whole
        batch: what has a row for each of the batch comes back whole and in order; sums, products,
        maxima and minima over rows are combined, and what follows from them (means, ratios,
        metrics) is computed once. A function whose rows meet in another way (batch statistics,
        noise in the batch's shape) runs on the whole batch at once, which a warning says.

        Args:
          function: ``(state, batch, ...) -> anything`` with a flax ``TrainState``, or ``(model,
            batch, ...) -> anything`` with NNX: the model alone, or an optimizer, metrics and other
            NNX objects with it, in any order. All but parameters may change in place, as under
            ``nnx.jit``.
          static_argnums, static_argnames, batch_argnums: As for a step.

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
        arguments = Arguments(
            function, static_argnums, static_argnames, batch_argnums, returns_state=False
        )
        return Evaluation(arguments, self.states)

    def _other(
        self, config: ZeroConfig, function: Any, objects: Any, batch: Any, args: Any, kwargs: Any
    ) -> tuple[Plan, Callable[[], Any]]:
        """Plan and programs of a step under another config on the same devices."""
        other = Zero(config, self.mesh, self.states.specs, self._donate, params=self.states.params)
        if len(objects) == 1:  # memory is short: no copies of a state are to be made
            objects = jax.eval_shape(lambda state: state, objects)
        n = len(objects)
        step = other(
            function,
            state_argnums=range(n),
            batch_argnums=n,
            batch_axis=function.form.batch_axis,
        )
        return other.plan(*objects), lambda: step.programs(*objects, batch, *args, **kwargs)

    def init(self, create_state: Callable[..., Any], *args: Any) -> Any:
        """Makes a state whose arrays are sharded from the start.

        Args:
          create_state: ``create_state(*args)`` returns a ``TrainState``; a tuple of an
            ``nnx.Module``, its ``nnx.Optimizer`` and further NNX objects (metrics, ``nnx.Rngs``) in
            any order; or any other pytree of arrays. It runs under ``jit``.
          *args: Usually a PRNG key.

        Returns:
          The state, on the mesh as planned, with its optimizer wrapped as the config asks.
        """
        return self.states.init(create_state, *args)

    def abstract_state(self, create_state: Callable[..., Any], *args: Any) -> Any:
        """The state that :meth:`init` returns, as ``jax.ShapeDtypeStruct`` with shardings: for
        ``train_step.lower`` and for orbax to restore into. Touches no device."""
        return self.states.abstract(create_state, *args)

    def plan(self, *state: Any) -> Plan:
        """How a state lies over the devices, and why.

        Args:
          *state: A ``TrainState``, NNX objects as :meth:`init` makes them (or their tuple), or
            another pytree, abstract or not.

        Returns:
          Trees of ``PartitionSpec`` as ``params``, ``grads``, ``opt_state``; ``str()`` of the plan
          is a table with bytes per device and reasons.
        """
        objects = state[0] if len(state) == 1 and type(state[0]) is tuple else state
        return self.states.plan(self.states.open(tuple(objects)))

    def optimizer(self, *, weight_decay_mask: Any = None) -> ZeroTransformation:
        """The config's optimizer with schedule, clipping and loss scale, for optax.

        Args:
          weight_decay_mask: The parameters that decay, as for optax: a tree of bools in the form
            of the parameters, or a function from the parameters to one. None leaves the choice to
            the config.

        Raises:
          ConfigError: The config names no optimizer.
        """
        config = self.config
        if config.optimizer is None:
            raise ConfigError(
                'optimizer: the config names none. Add {"optimizer": {"type": "AdamW", "params": '
                '{"lr": 1e-3}}}, or pass an optax transformation to TrainState.create yourself.'
            )
        tx, learning_rate = named_optimizer(
            config.optimizer, config.scheduler, weight_decay_mask=weight_decay_mask
        )
        return wrap(tx, learning_rate=learning_rate, **features(config))

    def wrap(self, tx: optax.GradientTransformation) -> ZeroTransformation:
        """The config's clipping and telemetry around the user's own optax transformation."""
        return self.states.wrap(tx)

    @property
    def sequence(self) -> SequenceAxis | None:
        """The mesh's axis "seq", over which rows are cut along their tokens, for models that attend
        over all of them; None where the mesh has none.

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
        function: Callable[..., Any],
        *,
        whole: Collection[int] = (),
        cut: Mapping[str, int] | None = None,
    ) -> Callable[..., Any]:
        """``function`` run by each device on its own rows of a batch.

        A decorated step is written for the whole batch, and XLA shares the work out. A function
        that XLA cannot divide, such as a kernel of ``pallas_kernels``, goes through this method;
        the step may differentiate the result. Gradients of ``whole`` arguments are summed over the
        devices.

        Args:
          function: A function of arrays (or trees of them) [rows of the batch, ...] that gives
            such arrays; a row's results must not depend on other rows.
          whole: Positions of the arguments that every device has whole: weights, scalars.
          cut: Axes of the mesh beside those of the batch, and the dimension that each cuts, of all
            results and of the other arguments that have it: ``{"model": 2}`` for the heads of
            attention [B, T, H, d] under tensor parallelism.

        Raises:
          ValueError: On a call, a first dimension, or one of ``cut``, does not divide among the
            devices; ``cut`` names no axis of the mesh, or one of the batch.

        Example:
          >>> import jax.numpy as jnp, pallas_kernels, zerojax
          >>> zero = zerojax.zero(stage=3)
          >>> norm = zero.per_device(pallas_kernels.rms_norm, whole=[1])
          >>> norm(jnp.ones((8, 4)), jnp.full(4, 2.0)).shape
          (8, 4)
        """
        return per_device(function, self.states.mesh, whole, cut or {})


def zero(
    config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
    specs: Any = None,
    params: Callable[[Any], Any] | None = None,
    donate: bool = True,
    auto: Mapping[str, Any] | None = None,
    check_finite: bool | None = None,
    check_memory: bool = True,
    **keywords: Any,
) -> Zero:
    """Reads a config and returns the decorator of a train step.

    Args:
      config: A DeepSpeed JSON (or HJSON) as a path or a dict, with DeepSpeed's defaults; the YAML
        of ``accelerate config``, likewise; or a :class:`ZeroConfig`.
      mesh: The devices; by default all devices on one "data" axis, in replica groups where the
        config has ``mics_shard_size``. ZeRO shards over "data", together with "seq" where the mesh
        has that axis, which cuts rows along their tokens, and the batch is spread over
        "replica" too; other axes are the user's.
      specs: The user's own ``PartitionSpec`` for parameters, as a tree or a prefix of one, or a
        function from the parameters to one, where the model does not carry them itself (flax
        partitioning metadata, logical or not), or in place of those: ``PartitionSpec()`` leaves
        all parameters to ZeRO.
      params: A function from the state to its parameters, a subtree, for a state that is neither a
        ``TrainState`` nor NNX objects: ``lambda state: state[0]`` for the arguments ``(params,
        opt_state)`` of a step. Half precision, offload and ZeRO++ ask for it where no single part
        of the state has the form of the optimizer's moments.
      donate: Reuse the memory of the state passed to the step, which is then gone, as with
        ``jax.jit(donate_argnums=0)``.
      auto: Values for each "auto" of the config that only the program knows, by dotted key:
        ``{"scheduler.params.total_num_steps": 300}``.
      check_finite: Skip updates whose gradient is not finite at any precision, beside ``config``
        or in place of it: parameters and optimizer state stay as they are, and
        ``telemetry(state)["skipped_steps"]`` counts the step. As ``fp16`` always does, and
        ``bf16`` in a DeepSpeed JSON unless ``check_grad_overflow`` is false; DeepSpeed has no
        such key for fp32. None leaves the choice to the config, where the check is off by default.
      check_memory: Compile a step before it runs for the first time, and raise
        :class:`zerojax.OutOfMemoryError` where it needs more memory than the devices have free,
        with settings that fit. False runs the step and leaves that error to XLA. On devices that
        do not say how much is free (CPUs) nothing is checked.
      **keywords: The fields of :class:`ZeroConfig` in place of ``config``; nothing happens that
        they do not ask for.

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
            f"zerojax.zero was given {name} for its config, which is a path, a mapping or a "
            f"ZeroConfig: write @zerojax.zero(stage=3), or zerojax.zero(config)({name})."
        )
    if config is not None and keywords:
        raise ConfigError(
            f"{', '.join(keywords)}: pass a config or keywords, not both; change the config."
        )
    if config is None and auto:
        raise ConfigError(f"auto: there is no config with {', '.join(auto)}; pass one.")
    resolved = ZeroConfig.from_keywords(**keywords) if config is None else load(config, auto=auto)
    if check_finite is not None:
        notes = tuple(note for note in resolved.notes if note.key != "check_finite")
        resolved = dataclasses.replace(resolved, check_finite=check_finite, notes=notes)
    if resolved.autotuning:
        raise ConfigError(
            "autotuning.enabled = true: tuning is a run of its own that trains nothing, here "
            "`python -m zerojax fit --config CONFIG --model NAME --devices KIND:N --out FILE`, "
            "which searches within this section; train with FILE, or set enabled to false"
        )
    devices = mesh
    if devices is None:
        groups, words = resolved.mics_shard_size, resolved.words("mics_shard_size")
        devices = in_groups(all_devices(), groups, words)
    if devices.devices.flat[0].addressable_memories():  # devices that are not there are one's own
        require_joined()
    made = Zero(resolved, devices, specs, donate, check_memory, params)
    if resolved.dump_state and log.is_first():
        lines.say(f"config:\n{resolved_text(resolved, batch_devices(made.mesh))}")
    return made
