"""The optimizer that the user's step sees.

The ``opt_state`` of the state in the user's step is a :class:`View`, and its ``tx`` takes and
returns views. The effects of ``apply_gradients`` thus pass through the user's code as plain
values, whatever that code does with the state. A state that is any pytree has no ``tx``: its view
replaces the state of the wrapped optimizer that the step closes over, and carries the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from zerojax.optim.frozen import Run
from zerojax.optim.wrap import CarriedState, ZeroOptState, ZeroTransformation
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

Constrain = Callable[[PyTree], PyTree]


def updating(
    tx: ZeroTransformation, to_shards: Constrain, run: Run | None
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates immediately.

    Args:
      tx: The wrapped transformation.
      to_shards: Constrains a gradient tree to its shards.
      run: Runs the jaxpr of the wrapped transformation's update; None for JAX.
    """

    def update(
        grads: PyTree, view: View, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, View]:
        before = params if view.masters is None else view.masters
        grads = to_shards(mark(grads, GRADIENT))
        updates, opt = tx.update(grads, view.opt, before, run=run, **extra)
        if view.masters is None:
            return updates, dataclasses.replace(view, opt=opt)
        after = optax.apply_updates(before, updates)
        # Measured from the copy, to which the step adds them: the sum of many rounded updates
        # would drift away from the masters.
        updates = jax.tree.map(lambda m, p: m - p.astype(m.dtype), after, view.compute)
        config: Any = jax.config
        if config.jax_numpy_dtype_promotion == "strict":  # else the step could not add them
            updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, view.compute)
        compute = optax.apply_updates(view.compute, updates)
        return updates, dataclasses.replace(view, opt=opt, masters=after, compute=compute)

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
        if extra:
            raise TypeError(
                f"apply_gradients passes {sorted(extra)} to the optimizer, which under offload "
                "runs after the step. Train without offload."
            )
        used = jax.tree.unflatten(jax.tree.structure(grads), uses)
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

    def unless_skipped(x: jax.Array, old: jax.Array) -> jax.Array:
        return x if done is None else jnp.where(done, x, old)

    def chosen(
        new: jax.Array, given: jax.Array, old: jax.Array, master: jax.Array, updated: jax.Array
    ) -> jax.Array:
        # One variable after with_updated_copies: no comparison, which would keep both copies alive.
        if new is updated:
            return master
        changed = jnp.where(new == given, old, new.astype(master.dtype))
        # In the dtype of the copy: the step may add the update in a wider one.
        is_updated = new.astype(updated.dtype) == updated
        return unless_skipped(jnp.where(is_updated, master, changed), old)

    if view.masters is None:
        return jax.tree.map(unless_skipped, returned, before)
    return jax.tree.map(chosen, returned, given, before, view.masters, view.compute)


def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the floating leaves of a tree to a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def constrainer(shardings: PyTree) -> Constrain:
    """Returns a function that constrains a tree to ``shardings``, a tree of the same structure."""
    return lambda tree: jax.tree.map(lax.with_sharding_constraint, tree, shardings)
