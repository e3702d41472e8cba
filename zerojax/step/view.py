"""The optimizer that the user's step sees.

The ``opt_state`` of the state in the user's step is a :class:`View`, and its ``tx`` takes and
returns views. The effects of ``apply_gradients`` thus pass through the user's code as plain
values, whatever that code does with the state. A state that is any pytree has no ``tx``: its view
replaces the state of the wrapped optimizer that the step closes over, and carries the update.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath, PyTreeDef
from jax.typing import DTypeLike

from zerojax.optim.frozen import Run
from zerojax.optim.wrap import CarriedState, ZeroOptState, ZeroTransformation, choose
from zerojax.plan.state_sharding import Plan
from zerojax.trace.marks import GRADIENT, UNUSED, mark
from zerojax.xla.types import MaybeNone, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View(CarriedState):
    """The ``opt_state`` in the user's step: it is read and written like optax's own state, or like
    a ``ZeroOptState`` in a state that is any pytree, and carries zerojax's values too.

    Attributes:
      opt: The wrapped optimizer's state.
      masters: The full-precision parameters, if the step computes with a copy; else None.
      compute: The compute parameters after the last update; None if the step computes them, by
        adding the update.
      grads: The gradient that the optimizer received, if the update comes after the step; else
        None.
      updates: Zeros in place of the update, if the update comes after the step; else None.
      update: ``(tx, grads, view, params, **extra) -> (updates, view)``, the update when the step
        calls ``tx``, a wrapped optimizer that it closes over; None if the state has the optimizer.
    """

    opt: ZeroOptState
    masters: PyTree = None
    compute: PyTree = None
    grads: PyTree = None
    updates: PyTree = None
    update: Callable[..., tuple[PyTree, View]] | MaybeNone = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def inner(self) -> optax.OptState:
        """The optimizer's state in optax's form."""
        return self.opt.inner

    def around(self, inner: optax.OptState) -> View:
        """Returns this view with another optax state."""
        return dataclasses.replace(self, opt=self.opt.with_inner(inner))

    def updated(
        self, tx: ZeroTransformation, grads: PyTree, params: PyTree, **extra: object
    ) -> tuple[PyTree, View]:
        return self.update(tx, grads, self, params, **extra)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that Python or JAX looks for
            raise AttributeError(name)
        return getattr(self._shown(), name)

    def __getitem__(self, key: object) -> PyTree:
        return self._shown()[key]

    def __setitem__(self, key: object, value: object) -> None:
        self._shown()[key] = value

    def __iter__(self) -> Iterator[PyTree]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def _replace(self, **fields: PyTree) -> View:
        shown = self._shown()._replace(**fields)
        return dataclasses.replace(self, opt=shown) if self.update else self.around(shown)

    def _shown(self) -> PyTree:
        """Returns the state that all reads and writes of this view refer to."""
        return self.opt if self.update else self.opt.inner


STARTS_AGAIN = (
    "the step calls tx.init, but under offload the optimizer state is not on the device. Call "
    "tx.init between two steps, or train without offload."
)

FULL_TREE_ONLY = (
    "Offload does not support gradients of another structure than state.params. Keep the "
    "parameters without gradients in another field of the state, or train without offload."
)

Constrain = Callable[[PyTree], PyTree]


def to_shards(plan: Plan) -> Constrain:
    """Returns a function that constrains a tree of gradients to the shards of its parameters.

    A gradient belongs to the first parameter of its shape whose path ends with the gradient's path;
    a gradient without such a parameter (that of a single example, say) is left to XLA.
    """
    paths = jax.tree_util.tree_leaves_with_path(plan.shardings().params)
    known = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, sharding), leaf in zip(paths, plan.leaves["params"], strict=True)
    }

    def constrain(path: KeyPath, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        ending = (at for at in known if at.endswith(name))
        for at in itertools.chain([name] if name in known else [], ending):
            shape, sharding = known[at]
            if tuple(x.shape) == tuple(shape):
                return lax.with_sharding_constraint(x, sharding)
        return x

    return lambda tree: jax.tree_util.tree_map_with_path(constrain, tree)


def updating(
    tx: ZeroTransformation, to_shards: Constrain, run: Run | None
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates immediately.

    A step may update a subtree of the parameters: flax's FP8 layers keep their scales beside the
    trained parameters. Its gradients may have another tree than the parameters: ``optax.lookahead``
    keeps two copies of the parameters, only one of which has gradients.

    Args:
      tx: The wrapped transformation.
      to_shards: Constrains a gradient tree to its shards.
      run: Runs the jaxpr of the wrapped transformation's update; None for JAX.
    """

    def update(
        grads: PyTree, view: View, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, View]:
        grads = to_shards(mark(grads, GRADIENT))
        if view.masters is None:
            updates, opt = tx.update(grads, view.opt, params, run=run, **extra)
            return updates, dataclasses.replace(view, opt=opt)
        structure: PyTreeDef = jax.tree.structure(grads if params is None else params)

        def is_part(x: PyTree) -> bool:
            return bool(jax.tree.structure(x) == structure)

        def put(part: PyTree, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: part if is_part(x) else x, tree, is_leaf=is_part)

        parts = [x for x in jax.tree.leaves(view.masters, is_leaf=is_part) if is_part(x)]
        if len(parts) != 1:
            raise NotImplementedError(
                "the step updates only some parameters, which are not one subtree of state.params "
                "with a structure of its own. Under bf16, fp16 or zero_hpz_partition_size, keep "
                "the other parameters in another field of the state."
            )
        (before,) = parts
        (copy,) = (x for x in jax.tree.leaves(view.compute, is_leaf=is_part) if is_part(x))
        updates, opt = tx.update(grads, view.opt, before, run=run, **extra)
        after = optax.apply_updates(before, updates)
        # Measured from the copy, to which the step adds them: the sum of many rounded updates
        # would drift away from the masters.
        updates = jax.tree.map(lambda m, p: m - p.astype(m.dtype), after, copy)
        config: Any = jax.config
        if config.jax_numpy_dtype_promotion == "strict":  # else the step could not add them
            updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, copy)
        masters = put(after, view.masters)
        compute = put(optax.apply_updates(copy, updates), view.compute)
        return updates, dataclasses.replace(view, opt=opt, masters=masters, compute=compute)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def collecting(to_shards: Constrain, uses: Sequence[bool]) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that only stores the gradient in ``View.grads``, in the dtype of the
    value stored there before, and returns ``View.updates``.

    Args:
      to_shards: Constrains a gradient tree to its shards.
      uses: Whether the update uses a parameter's gradient, one per parameter. Zeros replace the
        unused gradients.
    """

    def init(params: PyTree) -> NoReturn:
        raise TypeError(STARTS_AGAIN)

    def or_zeros(gradient: jax.Array, used: bool) -> jax.Array:
        # Nothing reads the mark, by which without_unused_gradients knows a gradient without a use.
        return gradient if used else jnp.zeros_like(mark(gradient, UNUSED))

    def update(
        grads: PyTree, view: View, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, View]:
        structure: PyTreeDef = jax.tree.structure(view.grads)
        if structure != jax.tree.structure(grads):
            raise NotImplementedError(FULL_TREE_ONLY)
        if extra:
            raise TypeError(
                f"apply_gradients passes {sorted(extra)} to the optimizer, which under offload "
                "runs after the step. Train without offload."
            )
        used = jax.tree.unflatten(structure, uses)
        grads = to_shards(mark(jax.tree.map(or_zeros, grads, used), GRADIENT))
        grads = jax.tree.map(lambda old, g: g.astype(old.dtype), view.grads, grads)
        return view.updates, dataclasses.replace(view, grads=to_shards(grads))

    return optax.GradientTransformationExtraArgs(init, update)


def params_after(
    view: View, returned: PyTree, given: PyTree, before: PyTree, done: jax.Array | None
) -> PyTree:
    """Returns the parameters to keep.

    Where the step returned the result of ``apply_gradients``, these are the new masters, and where
    it returned its input, the masters before the step. Where the step changed a parameter in
    another way (clipped a weight, say), the result is the step's own value, or the old value if the
    step was skipped. The update itself keeps the masters of a skipped step.

    Args:
      view: The view after the update.
      returned: Parameters that the step returned.
      given: Parameters that were passed to the step.
      before: Masters before the step.
      done: bool [], False for a skipped step; None if no step is ever skipped.
    """

    def chosen(
        new: jax.Array, given: jax.Array, old: jax.Array, master: jax.Array, updated: jax.Array
    ) -> jax.Array:
        # One variable after with_updated_copies: no comparison, which would keep both copies alive.
        if new is updated:
            return master
        changed = jnp.where(new == given, old, new.astype(master.dtype))
        # In the dtype of the copy: the step may add the update in a wider one.
        is_updated = new.astype(updated.dtype) == updated
        return unless_skipped(done, jnp.where(is_updated, master, changed), old)

    if view.masters is None:
        return unless_skipped(done, returned, before)
    return jax.tree.map(chosen, returned, given, before, view.masters, view.compute)


def unless_skipped(done: jax.Array | None, after: PyTree, before: PyTree) -> PyTree:
    """Returns ``after`` if the step was done, ``before`` if it was skipped."""
    return after if done is None else choose(done, after, before)


def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the floating leaves of a tree to a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def constrainer(shardings: PyTree) -> Constrain:
    """Returns a function that constrains a tree to ``shardings``, a tree of the same structure."""
    return lambda tree: jax.tree.map(lax.with_sharding_constraint, tree, shardings)
