"""The user's step, run on the parts of a state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from zerojax.graph.search import equations
from zerojax.optim.wrap import UNKNOWN, ZeroOptState, find_zero_state
from zerojax.placement.states import split_state
from zerojax.step.call import RearrangedFunction
from zerojax.step.partial_update import of_parts
from zerojax.step.view import STARTS_AGAIN, View
from zerojax.trace.dependence import unchanged
from zerojax.trace.marks import GRADIENT, count, is_mark
from zerojax.train_state.results import summary, take_out
from zerojax.train_state.state_parts import Parts, StateKind
from zerojax.xla import jaxprs
from zerojax.xla.lines import line
from zerojax.xla.types import Jaxpr, PyTree


class Body:
    """The user's function as a function of a state's parts.

    Args:
      function: The user's step.
      kind: Splits and rebuilds states.
      once: The reason why the step may update only once, with the remedy; empty if it may update
        more often.
      needs_tx: The keys of the config that take effect in the state's own optimizer.
    """

    function: RearrangedFunction
    kind: StateKind
    once: str
    name: str

    def __init__(
        self,
        function: RearrangedFunction,
        kind: StateKind,
        once: str,
        needs_tx: Sequence[str],
    ) -> None:
        self.function, self.kind, self.once, self._needs_tx = function, kind, once, needs_tx
        self.name = function.__name__
        self._sizes: list[int] = []  # gradients per update in the last trace

    def __call__(
        self,
        parts: Parts,
        tx: optax.GradientTransformationExtraArgs,
        batch: PyTree,
        args: PyTree,
        kwargs: PyTree,
    ) -> tuple[Parts, PyTree]:
        """Returns the state after the step, and the step's results, in which each object of the
        state is replaced by a :class:`zerojax.train_state.results.ObjectPlaceholder`.

        Args:
          parts: The state; ``parts.opt_state`` is a :class:`zerojax.step.view.View`.
          tx: The optimizer that the step sees, which takes and returns views.
          batch, args, kwargs: The other arguments of the step.

        Raises:
          TypeError: The step does not return its new state, or changes the state's structure.
          ValueError: The step does not update its model.
        """
        # Under accumulation a step is traced more than once.
        self._sizes.clear()
        tx = of_parts(tx, self.name, parts, self._sizes)
        view = parts.opt_state
        shown = parts
        if isinstance(view, View) and self.kind.optimizer_in_step:
            carried = dataclasses.replace(view, update=self._one_optimizer(tx))
            shown = parts._replace(opt_state=carried)
        state = self.kind.close(shown, tx)
        out = self.function(*state, batch, *args, **kwargs)
        new = state
        if self.kind.write_back is not None:
            new_parts = self.kind.split(*state)
            pairs = zip(*map(jax.tree.leaves, (new_parts.params, parts.params)), strict=False)
            # By identity: in a trace, an updated parameter is another tracer.
            is_same = all(new is old for new, old in pairs)
            # Of several models, the first is taken for the one that trains.
            if self.kind.knows_parameters and len(state) > 2 and is_same:
                raise ValueError(
                    f"{self.name} never updates the first model among its arguments. Pass the "
                    "model that it trains first."
                )
        else:
            returned = out
            if self.kind.optimizer_in_step:
                matches = [*map(_of_any_view, self.kind.matches(_without_views(state)))]
            else:
                matches = [*self.kind.matches(state)]
            found, out = take_out(out, matches)
            if len(found) < len(state):
                raise self._not_returned(state, found, returned)
            if not self.kind.any_pytree and take_out(out, matches)[0]:
                raise TypeError(
                    f"{self.name} returns two states ({summary(returned)}). Return only the new "
                    "one, and what you need of the other."
                )
            new = tuple(found[i] for i in range(len(state)))
            if not self.kind.any_pytree:
                new_parts = split_state(new).parts
            elif self.kind.optimizer_in_step:
                new_parts = self.kind.split(*new)
                new_parts = new_parts._replace(
                    opt_state=_view(new_parts.opt_state, view), step=parts.step + 1
                )
            else:
                new_parts = self.kind.split(*new)
        if self.kind.knows_parameters:
            new_parts = _with_own_update(new_parts, parts)
        else:
            if isinstance(view, View):
                view = dataclasses.replace(view, opt=_counted(view.opt, new))
            new_parts = new_parts._replace(opt_state=view, step=parts.step + 1)
        before: PyTreeDef = jax.tree.structure(parts)
        if before != jax.tree.structure(new_parts):
            raise TypeError(
                f"{self.name} changed the structure of the state ({_change(parts, new_parts)}). "
                "Create the state with everything that the step adds to it."
            )
        return new_parts, out

    def _one_optimizer(
        self, tx: optax.GradientTransformationExtraArgs
    ) -> Callable[..., tuple[PyTree, View]]:
        """Returns ``View.update`` by ``tx``, for one wrapped optimizer."""
        called: list[object] = []

        def update(
            called_tx: object, grads: PyTree, view: View, params: PyTree, **extra: object
        ) -> tuple[PyTree, View]:
            called.append(called_tx)
            if called_tx is not called[0]:
                raise ValueError(
                    f"{self.name} updates one optimizer state with two optimizers, of which each "
                    f"applies {' and '.join(self._needs_tx)}. Call one of them, or remove the keys "
                    "from the config."
                )
            return tx.update(grads, view, params, **extra)

        return update

    def _not_returned(
        self, state: Sequence[PyTree], found: Collection[int], returned: PyTree
    ) -> TypeError:
        leaves = jax.tree.leaves(returned, is_leaf=lambda x: isinstance(x, View | ZeroOptState))
        if self.kind.optimizer_in_step and any(isinstance(x, ZeroOptState) for x in leaves):
            return TypeError(STARTS_AGAIN)  # under offload, the state in the step lacks arrays
        kinds = [type(_without_views(x)).__name__ for i, x in enumerate(state) if i not in found]
        return TypeError(
            f"{self.name} returned {summary(returned)}, without the new state "
            f"({', '.join(kinds)}). Return the new state with the same tree, shapes and dtypes, "
            "alone or in tuples, lists and dicts, or name the state with state_argnums."
        )

    def check(self, jaxpr: Jaxpr, start: Parts, new_parts: Parts) -> None:
        """Checks the state that the traced step returns, and the step's updates.

        Args:
          jaxpr: The traced step.
          start: The state before the step, for the number and the paths of its arrays.
          new_parts: The shapes of the state after the step.

        Raises:
          TypeError: The step changes the shape of an array.
          ValueError: The step never updates, or updates more often than it may, or updates by an
            optimizer of its own although features of the config work in the state's optimizer.
        """
        if other := _other_shapes(start, new_parts):
            raise TypeError(
                f"{self.name} changed the shape of {other}. Reshape the step's result, or create "
                "the state in that shape."
            )
        if not self.kind.knows_parameters:  # its updates have no marks
            return
        leaves = len(jax.tree.leaves(start.params))
        times, looped = count(jaxpr, GRADIENT)
        # An update marks as many gradients as it receives: of a subtree, fewer than all parameters.
        n = times // max(1, min(self._sizes, default=leaves))
        if not n + looped and _updates_itself(jaxpr, start):
            if self._needs_tx:
                raise ValueError(
                    f"{self.name} updates with an optimizer of its own, which does not apply "
                    f"{' and '.join(self._needs_tx)}. Call state.tx.update or "
                    "state.apply_gradients, or remove the keys from the config."
                )
            return
        if not n + looped:
            raise ValueError(
                f"{self.name} never updates the state. Call state.apply_gradients (NNX: "
                "optimizer.update) with the gradients, or decorate a function that does not train "
                "with zero.evaluate."
            )
        if self.once and (n > 1 or looped):
            often = "in a loop" if looped else f"{n} times"
            marked = functools.partial(is_mark, name=GRADIENT)
            update = next(filter(marked, equations(jaxpr)), None)
            place = None if update is None else line(jaxprs.source(update).traceback)
            often += f" at {place}" if place else ""
            raise ValueError(f"{self.name} updates {often}, which {self.once}.")


def _without_views(tree: PyTree) -> PyTree:
    """Replaces each view in a tree by the optimizer state that it holds."""
    return jax.tree.map(
        lambda x: x.opt if isinstance(x, View) else x, tree, is_leaf=lambda x: isinstance(x, View)
    )


def _of_any_view(match: Callable[[PyTree], bool]) -> Callable[[PyTree], bool]:
    return lambda x: match(_without_views(x))


def _view(opt_state: PyTree, before: PyTree) -> PyTree:
    """Returns the view of a wrapped optimizer's state that a step returned. A new state from
    ``tx.init`` is put into the view that the step began with."""
    if isinstance(opt_state, View):
        return dataclasses.replace(opt_state, update=None)
    return dataclasses.replace(before, opt=opt_state) if isinstance(before, View) else opt_state


def _updates_itself(jaxpr: Jaxpr, start: Parts) -> bool:
    """Returns whether a step computes new parameters, and a new optimizer state if there is one."""
    n = len(jax.tree.leaves(start.params))
    m = n + len(jax.tree.leaves(start.opt_state.inner))

    sources = unchanged(jaxpr)

    def changes(begin: int, end: int) -> bool:
        return [*sources[begin:end]] != [*range(begin, end)]

    return changes(0, n) and (m == n or changes(n, m))


def _with_own_update(new_parts: Parts, before: Parts) -> Parts:
    """Counts the step in a new state if the step updated without the state's own optimizer."""
    view, old = new_parts.opt_state, before.opt_state
    if not isinstance(old, View):
        return new_parts
    if not isinstance(view, View):  # another optimizer returns optax's state
        view = old.around(view)
    # The state's own optimizer counts its updates; a counter that it left alone is the same tracer.
    if view.opt.steps is not old.opt.steps:
        return new_parts._replace(opt_state=view)
    opt = view.opt._replace(steps=old.opt.steps + 1, grad_norm=jnp.full((), UNKNOWN, jnp.float32))
    return new_parts._replace(opt_state=dataclasses.replace(view, opt=opt))


def _counted(own: ZeroOptState, objects: tuple[PyTree, ...]) -> ZeroOptState:
    """Counts a step of any pytree, and copies the numbers of a wrapped optimizer in its state."""
    own = own._replace(steps=own.steps + 1)
    if (found := find_zero_state(objects)) is None:
        return own
    return own._replace(
        skipped=found.skipped, grad_norm=found.grad_norm, learning_rate=found.learning_rate
    )


def _other_shapes(before: Parts, after: Parts) -> str:
    """Describes the first array whose shape differs between two states of the same structure."""
    pairs = zip(_by_path(before).items(), jax.tree.leaves(_named(after)), strict=True)
    for (path, old), new in pairs:
        if np.shape(old) != np.shape(new):
            return f"{path} from {np.shape(old)} to {np.shape(new)}"
    return ""


def _named(parts: Parts) -> dict[str, PyTree]:
    """Returns the fields of a state by name."""
    state = {**parts._asdict(), **parts.rest}
    del state["rest"]
    return state


def _by_path(parts: Parts) -> dict[str, ArrayLike]:
    leaves = jax.tree_util.tree_leaves_with_path(_named(parts))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def _change(before: Parts, after: Parts) -> str:
    """Describes the paths at which two states differ, at most three of each kind."""

    def some(names: list[str], what: str) -> list[str]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return [f"{', '.join(names[:3])}{more} {what}"] if names else []

    old, new = _by_path(before), _by_path(after)
    changes = some([x for x in old if x not in new], "left out")
    changes += some([x for x in new if x not in old], "added")
    return "; ".join(changes) or "containers of other types"
