"""From a user's state to a sharded one: its optimizer is wrapped, its leaves are planned, and its
arrays are created on the devices. :mod:`zerojax.placement.state_placer` places existing arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import (
    AXIS,
    REPLICA,
    STAGE,
    automatic_context,
    relabel_arrays,
    stage_size,
    zero_axis,
)
from zerojax.distributed import log
from zerojax.distributed.equality import require_same_program, require_same_values
from zerojax.distributed.join import require_same
from zerojax.distributed.lockstep import lockstep
from zerojax.optim.frozen import frozen_leaves
from zerojax.optim.moments import in_bf16, to_bf16
from zerojax.optim.wrap import (
    UNKNOWN,
    ZeroTransformation,
    adopt,
    configured,
    features,
    find_zero_state,
    full_precision,
    wrap,
)
from zerojax.placement.checks import (
    check_arguments,
    check_not_within,
    specs_by_key,
)
from zerojax.placement.placer import Placer
from zerojax.placement.state_placer import OwnedArrays, StatePlacer, by_path, is_on_mesh
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import check_memories, offloads
from zerojax.plan.planning import make_plan
from zerojax.plan.stacks import with_stages
from zerojax.plan.state_sharding import Plan
from zerojax.quantize import is_quantized
from zerojax.trace.explicit import evaluate
from zerojax.train_state.linen import is_train_state, open_state
from zerojax.train_state.nnx import is_nnx, open_objects
from zerojax.train_state.pytree import find_parameters, open_pytree, specs_of_arrays
from zerojax.train_state.state_parts import OpenedState, Parts, spread_specs
from zerojax.xla import compat, jaxprs
from zerojax.xla.types import PyTree, Shaped

LITTLE, SMALL = 0.01, 2**20
"""The fraction of a device's bytes at rest, and the bytes, that may exceed its share without a
warning."""
_FSDP = "fsdp"
"""The name of the shard axis in other libraries."""


class States:
    """Turns a user's states into sharded ones.

    Args:
      config: The config.
      mesh: The devices.
      specs: The user's specs of the parameters: a tree (or prefix) of ``PartitionSpec``, or a
        function from the parameters to such a tree; None takes the model's metadata.
      params: A function from a state that is any pytree to its parameters; None recognizes them by
        the optimizer's moments.

    Attributes:
      axis: The axis over which ZeRO shards.
      placer: Puts arrays into the places of the plan.
      owned: The arrays that zerojax created for states other than ``TrainState`` and NNX objects.
    """

    def __init__(
        self,
        config: ZeroConfig,
        mesh: Mesh,
        specs: PyTree = None,
        params: Callable[[PyTree], PyTree] | None = None,
    ) -> None:
        self.config, self.mesh, self.specs, self.params = config, mesh, specs, params
        self.axis: str = zero_axis(mesh)
        self.owned: OwnedArrays = OwnedArrays()
        self.placer: Placer = Placer(config, mesh)
        self._logged = set[str]()
        self._wrapped: dict[optax.GradientTransformation, ZeroTransformation] = {}
        # PartitionSpec() for all replaces the model's specs, whatever the parameters are.
        self._names_axes: bool = specs is not None and specs != PartitionSpec()

    def wrap(self, tx: optax.GradientTransformation) -> ZeroTransformation:
        """Wraps ``tx`` with the config's features; returns the same object for the same ``tx``."""
        if tx not in self._wrapped:
            named = {"optimizer": self.config.optimizer, "scheduler": self.config.scheduler}
            unused = [f"{name} ({x.type})" for name, x in named.items() if x is not None]
            if unused and not self._wrapped:
                remedy = (
                    "optax.adamw(zerojax.schedule(zero.config.scheduler, base_lr))"
                    if named["optimizer"] is None
                    else "zero.optimizer()"
                )
                log.warning(
                    "the config's %s has no effect: the state has its own optimizer. Create the "
                    "state with %s to use the config's.",
                    " and ".join(unused),
                    remedy,
                )
            self._wrapped[tx] = configured(tx, self.config)
        return self._wrapped[tx]

    def open(self, objects: tuple[PyTree, ...]) -> OpenedState:
        """Splits a state, one ``TrainState``, NNX objects or any pytree, and wraps the optimizer.

        Raises:
          TypeError: The objects are not a state.
          ValueError: The state has no parameters, or its optimizer is wrapped differently.
        """
        opened = self.split_with_parameters(objects)
        in_place = opened.kind.write_back is not None
        has_own = opened.kind.any_pytree and not in_place and find_zero_state(objects) is not None
        if opened.kind.any_pytree:
            self._check_features(wrapped=has_own, in_place=in_place)
        elif not jax.tree.leaves(opened.parts.params):
            raise ValueError(
                "the state has no parameters: params is empty. Pass the params of model.init(...) "
                "to TrainState.create."
            )
        opened = dataclasses.replace(opened, specs=self._own_specs(opened, read_only=False))
        is_wrapped = opened.kind.optimizer_in_step or isinstance(opened.tx, ZeroTransformation)
        if is_wrapped:
            scaled = getattr(opened.parts.opt_state, "loss_scale", None) is not None
            if scaled != self.config.fp16:
                raise ValueError(
                    f"fp16 is {'on' if self.config.fp16 else 'off'}, but the state's optimizer has "
                    f"{'a' if scaled else 'no'} loss scale. Create the state with zero.init, "
                    "zero.optimizer() or zero.wrap() of this zero."
                )
            if self.config.bf16_moments and not in_bf16(opened.parts.opt_state):
                raise ValueError(
                    "bf16_optimizer_states is on, but the state's optimizer stores float32 "
                    "moments. Create the state with zero.init, zero.optimizer() or zero.wrap() of "
                    "this zero."
                )
        else:
            check_not_within(opened.parts.opt_state)

        def prepare(parts: Parts) -> Parts:
            parts = jax.tree.map(_array, relabel_arrays(parts, self.mesh))
            if self.config.compute_dtype and opened.kind.optimizer_in_step:  # has fp32 moments
                parts = parts._replace(params=jax.tree.map(full_precision, parts.params))
            elif self.config.compute_dtype:
                parts = _full_precision_masters(parts, opened.tx)
            if not is_wrapped:
                loss_scale = features(self.config)["loss_scale"]
                norm = UNKNOWN if opened.kind.any_pytree else 0.0
                low, inner = self.config.bf16_moments, parts.opt_state
                adopted = adopt(to_bf16(inner) if low else inner, parts.step, loss_scale, norm)
                parts = parts._replace(opt_state=adopted)
            return parts

        leaves = jax.tree.leaves(opened.parts)
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        parts = jax.eval_shape(prepare, opened.parts) if abstract else prepare(opened.parts)
        if has_own and not is_wrapped:  # the config's optimizer is in use
            self._wrapped.setdefault(opened.tx, wrap(opened.tx))
        # For any other pytree `StatePlacer.donatable` decides array by array what to copy.
        plain = not is_wrapped and not opened.kind.any_pytree
        tx = opened.tx if is_wrapped else self.wrap(opened.tx)
        return dataclasses.replace(opened, parts=parts, tx=tx, plain=plain)

    def _check_features(self, *, wrapped: bool, in_place: bool) -> None:
        """Rejects, for a state that is any pytree, keys that need a wrapped optimizer if it has
        none.

        Args:
          wrapped: Whether the state contains one of ``zero.optimizer()`` or ``zero.wrap()``.
          in_place: Whether the state is NNX objects, with optimizers anywhere among them.
        """
        if self.config.zero_quantized_nontrainable_weights:
            raise ValueError(
                "zero_quantized_nontrainable_weights needs a TrainState, whose optimizer tells "
                "which weights it does not update. Pass TrainState.create(apply_fn=..., "
                "params=..., tx=...), or remove the key from the config."
            )
        keys = self.keys_of_parameters()
        if self.config.gradient_clipping:
            keys.append(f"gradient_clipping = {self.config.gradient_clipping:g}")
        if in_place and self._names_axes:
            keys.append("zerojax.zero(specs=...)")
        if keys and not wrapped:
            remedy = (
                "Pass one model with one nnx.Optimizer(model, tx, wrt=nnx.Param) to each step"
                if in_place
                else "Create the optimizer with zero.wrap(tx) or zero.optimizer(), and its state "
                "with tx.init(params)"
            )
            raise ValueError(
                f"the step updates with an optimizer of its own, which does not apply "
                f"{' and '.join(keys)}. {remedy}, or remove the keys from the config."
            )

    def keys_of_parameters(self) -> list[str]:
        """Returns the keys in use for which zerojax must know the parameters of a state."""
        config = self.config
        in_use = {
            "bf16 or fp16": config.compute_dtype is not None,
            "offload_optimizer": config.offload_optimizer is not None,
            "offload_param": config.offload_param is not None,
            "zero_quantized_weights": config.zero_quantized_weights,
            "zero_quantized_gradients": config.zero_quantized_gradients,
            "zero_hpz_partition_size": config.zero_hpz_partition_size > 1,
        }
        return [name for name, is_used in in_use.items() if is_used]

    def split_with_parameters(
        self, objects: tuple[PyTree, ...], *, read_only: bool = False
    ) -> OpenedState:
        """Splits a state into its arrays, see :func:`split_state`; finds its parameters if the
        config needs them."""
        keys = self.keys_of_parameters()
        opened = split_state(objects, read_only=read_only)
        in_place = opened.kind.write_back is not None
        if in_place or not opened.kind.any_pytree or not keys or find_zero_state(objects) is None:
            return opened
        parameters = find_parameters(objects, " and ".join(keys), self.params)
        return open_pytree(objects, parameters)

    def observed(self, opened: OpenedState) -> OpenedState:
        """Prepares a state for an evaluation, which needs no wrapped optimizer."""
        parts = jax.tree.map(_array, opened.parts)
        specs = self._own_specs(opened, read_only=True)
        return dataclasses.replace(opened, parts=parts, specs=specs)

    def plan(self, opened: OpenedState) -> Plan:
        """Plans the sharding of a state; warns once of bytes beyond a device's share, and of large
        extra state that is replicated.

        Raises:
          ValueError: The mesh has an axis "fsdp" that ZeRO does not use and that shards no
            parameter.
        """
        parts, frozen = opened.parts, list[bool]()
        if self.config.zero_quantized_nontrainable_weights:
            frozen = frozen_leaves(opened.tx, parts.params, parts.opt_state)
        tx = None if opened.kind.optimizer_in_step else opened.tx
        plan = make_plan(parts, tx, opened.specs, self.mesh, self.config, frozen)
        own_axes = {
            axis for leaf in plan.leaves["params"] for e in leaf.own_spec for axis in layout.axes(e)
        }
        if self.axis != _FSDP and self.mesh.shape.get(_FSDP, 1) > 1 and _FSDP not in own_axes:
            raise ValueError(
                f"ZeRO shards over the mesh axis {self.axis!r}, and this mesh has {_FSDP!r} "
                f"({self.mesh.shape[_FSDP]} devices). Rename the axis to {AXIS!r}, and an axis "
                f"between copies of the state to {REPLICA!r}."
            )
        leaves = plan.all_leaves()
        n_bytes = sum(leaf.bytes_per_device for leaf in leaves)
        lost = sum(leaf.lost for leaf in leaves)
        if lost > max(LITTLE * n_bytes, SMALL):
            self.warn_once(plan.lost)
        self.warn_once(plan.replicated_state)
        return plan

    def warn_once(self, message: str) -> None:
        """Logs a warning unless it is empty or logged before."""
        if message and message not in self._logged:
            self._logged.add(message)
            log.warning("%s.", message)

    def _own_specs(self, opened: OpenedState, *, read_only: bool) -> tuple[Spec, ...]:
        """Returns the user's spec of each parameter; of each array of ``Parts.rest`` if the
        parameters are not known."""
        parts, is_known = opened.parts, opened.kind.knows_parameters
        arrays = parts.params if is_known else parts.rest
        leaves = jax.tree.leaves(arrays)
        given: Sequence[Spec | PartitionSpec | None] = opened.specs if self.specs is None else ()
        if self._names_axes and is_known:
            given = self._user_specs(arrays)
        elif self._names_axes:
            remedy = " zerojax.zero(params=lambda state: ...) names the parameters of a state."
            specs_of = functools.partial(self._user_specs, remedy=remedy)
            given = specs_of_arrays(arrays, self.params, specs_of, read_only=read_only)
        given = given or [None] * len(leaves)
        own = [
            layout.full(spec or (self._spec_of(x) if is_known else None), len(np.shape(x)))
            for spec, x in zip(given, leaves, strict=True)
        ]
        stages = stage_size(self.mesh)
        has_stage = any(STAGE in layout.axes(e) for spec in given for e in spec or ())
        return tuple(own if stages == 1 or has_stage else with_stages(arrays, own, stages))

    def _user_specs(self, params: PyTree, remedy: str = "") -> tuple[PartitionSpec | None, ...]:
        """Returns the spec of each parameter in the user's tree, or by the user's function."""
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_quantized(x) else x,
            params,
            is_leaf=is_quantized,
        )
        user_specs = self.specs(arrays) if callable(self.specs) else self.specs
        specs = specs_by_key(user_specs, arrays, remedy)
        return spread_specs(specs, jax.tree.leaves(params, is_leaf=is_quantized))

    def _spec_of(self, x: object) -> PartitionSpec | None:
        """Returns the spec of an array on this mesh, without ZeRO's axis; None for other arrays."""
        if isinstance(x, jax.core.Tracer):  # has none; raising that takes seconds
            return None
        sharding: Any = getattr(x, "sharding", None)
        if not is_on_mesh(sharding, self.mesh):
            return None
        return PartitionSpec(*layout.without(tuple(sharding.spec), self.axis))

    def init(self, create: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Creates the state ``create(*args)`` sharded: no device ever stores more than its
        shards."""
        with automatic_context(self.mesh) as explicit:
            make, opened, arrays = self._maker(create, args, explicit)
            if calls := lockstep(self.mesh):  # the state is the same in all processes
                calls.note("zero.init")
                require_same(self.config, self.mesh)
                require_same_values("zero.init", by_path(args, "argument "))
                require_same_program("zero.init", [make.lower(*arrays)])
            shapes = jax.eval_shape(make, *arrays)
            plan = self.plan(dataclasses.replace(opened[0], parts=shapes))
            if offloads(self.config):
                check_memories(self.config, self.mesh)
            parts = self.placer.create_sharded(make, arrays, plan, shapes)
            state = _in_user_form(opened[0], parts)
            if opened[0].kind.any_pytree:
                self.owned.add(parts)
            return state

    def abstract(self, create: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Returns the result of :meth:`init` as ``jax.ShapeDtypeStruct`` with shardings."""
        with automatic_context(self.mesh) as explicit:
            make, opened, arrays = self._maker(create, args, explicit)
            shapes = jax.eval_shape(make, *arrays)
        plan = self.plan(dataclasses.replace(opened[0], parts=shapes))
        return _in_user_form(opened[0], abstract(shapes, plan))

    def _maker(
        self, create: Callable[..., PyTree], args: tuple[PyTree, ...], explicit: tuple[str, ...]
    ) -> tuple[jax.stages.Wrapped, list[OpenedState], tuple[jax.Array, ...]]:
        """Returns the jitted function that creates a state, a list for the opened state without
        arrays, which tracing the function fills, and the arrays among ``args``, which the function
        takes. All else, such as a rate or a model, is part of the function: the state's optimizer
        may keep it, which a tracer would not outlive."""
        if is_nnx(create) or not callable(create):
            raise TypeError(
                f"zero.init and zero.abstract_state take a function that creates the state, got a "
                f"{type(create).__name__}. Write zero.init(create_state, key), or pass the state "
                "to the step, which places it."
            )
        check_arguments(create, args)
        opened: list[OpenedState] = []
        leaves, tree = jax.tree.flatten(relabel_arrays(args, self.mesh))
        traced = [isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray) for x in leaves]

        def make(*arrays: jax.Array) -> Parts:
            rest = iter(arrays)
            given = [next(rest) if array else x for x, array in zip(leaves, traced, strict=True)]
            with _with_note_on_seeds(args):
                created = create(*jax.tree.unflatten(tree, given))
            state = self.open(created if type(created) is tuple else (created,))
            # Shapes in place of the tracers, which must not leave the trace.
            shapes = jax.tree.map(jaxprs.like, state.parts)
            opened.append(dataclasses.replace(state, parts=shapes))
            return jax.tree.map(jnp.asarray, state.parts)

        @functools.wraps(create)  # for JAX's messages
        def make_on_mesh(*arrays: jax.Array) -> Parts:
            if explicit:
                return evaluate(make, arrays, self.mesh, explicit)
            # No mesh is in the context, as under plain jit: with one, linen would constrain the
            # result of an initializer, even of a kernel not yet in its final shape.
            try:
                return make(*arrays)
            except ValueError as error:  # NNX demands one for annotated variables
                if "mesh context" not in str(error):
                    raise
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return make(*arrays)

        arrays = tuple(compress(leaves, traced))
        return jax.jit(make_on_mesh, inline=compat.INLINE), opened, arrays

    def state_placer(self, plan: Plan) -> StatePlacer:
        """Returns the placer of states with this plan."""
        return StatePlacer(self.placer, self.owned, plan)


def split_state(objects: tuple[PyTree, ...], *, read_only: bool = False) -> OpenedState:
    """Splits a ``(TrainState,)``, NNX objects, or any pytree.

    Args:
      objects: The state. One of NNX objects is their optimizer.
      read_only: Whether NNX objects may be without an optimizer.

    Raises:
      TypeError: The objects are not a state.
    """
    if any(map(is_nnx, objects)):
        return open_objects(objects, read_only=read_only)
    if len(objects) == 1 and is_train_state(*objects):
        return open_state(*objects)
    return open_pytree(objects)


@contextlib.contextmanager
def _with_note_on_seeds(args: Sequence[PyTree]) -> Iterator[None]:
    """Adds to an error of the function that creates a state that a number is no random key."""
    try:
        yield
    except Exception as error:
        seeds = [x for x in args if isinstance(x, int) and not isinstance(x, bool)]
        if seeds:
            error.add_note(
                f"zerojax: {seeds[0]} was passed as a number. Where a random key is meant, pass "
                f"jax.random.key({seeds[0]})."
            )
        raise


def _in_user_form(opened: OpenedState, parts: Parts) -> PyTree:
    """Rebuilds the state in the form of the user's function: one object, or a tuple of several."""
    objects = opened.close(parts)
    return objects[0] if len(objects) == 1 else objects


def abstract(parts: Parts, plan: Plan, *, at_rest: bool = False) -> Parts:
    """Returns the shapes and dtypes of a state with the plan's shardings; padded if ``at_rest``."""

    def shape_of(x: Shaped, leaf: Leaf) -> jax.ShapeDtypeStruct:
        shape = leaf.padded if at_rest else leaf.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=plan.sharding(leaf))

    return plan.each(shape_of, parts, plan.all_leaves())


def _array(x: object) -> object:
    """Converts a Python number to an array."""
    return jnp.asarray(x, jnp.result_type(x)) if isinstance(x, int | float | complex) else x


def _full_precision_masters(parts: Parts, tx: optax.GradientTransformation) -> Parts:
    """Casts masters to float32, whatever dtype the model has, and their moments to match."""
    params = jax.tree.map(full_precision, parts.params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(parts.params), strict=True)
    if all(new is old for new, old in pairs):
        return parts
    expected = jax.tree.leaves(jax.eval_shape(tx.init, params))
    leaves, tree = jax.tree.flatten(parts.opt_state)
    opt_state = [x.astype(m.dtype) for x, m in zip(leaves, expected, strict=True)]
    return parts._replace(params=params, opt_state=jax.tree.unflatten(tree, opt_state))
