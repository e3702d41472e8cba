"""The user's step, run on the parts of a state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef

from zerojax.graph.search import equations
from zerojax.optim.wrap import UNKNOWN, ZeroOptState, find_zero_state
from zerojax.step.call import RearrangedFunction
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
        *further: PyTree,
    ) -> tuple[Parts, PyTree]:
        """Returns the state after the step, and the step's results, in which each object of the
        state is replaced by a :class:`zerojax.train_state.results.ObjectPlaceholder`.

        Args:
          parts: The state; ``parts.opt_state`` is a :class:`zerojax.step.view.View`.
          tx: The optimizer that the step sees, which takes and returns views.
          batch, *further: The other arguments of the step.

        Raises:
          TypeError: The step does not return its new state, or changes the state's structure.
          ValueError: The step does not update its model.
        """
        # Under accumulation a step is traced more than once.
        self._sizes.clear()
        view = parts.opt_state

        def init(params: PyTree) -> PyTree:
            opt_state = tx.init(params)
            return view.around(opt_state.inner) if isinstance(view, View) else opt_state

        def update(
            grads: PyTree, opt_state: PyTree, params: PyTree = None, **extra: object
        ) -> tuple[PyTree, PyTree]:
            self._sizes.append(len(jax.tree.leaves(grads)))
            return tx.update(grads, opt_state, params, **extra)

        shown = parts
        if isinstance(view, View) and self.kind.optimizer_in_step:
            carried = dataclasses.replace(view, update=self._one_optimizer(update))
            shown = parts._replace(opt_state=carried)
        state = self.kind.close(shown, optax.GradientTransformationExtraArgs(init, update))
        out = self.function(*state, batch, *further)
        in_place = self.kind.write_back is not None
        new, out = (state, out) if in_place else self._new_state(state, out)
        new_parts = self.kind.split(*new)
        # Of several models, the first is taken for the one that trains.
        if in_place and self.kind.knows_parameters and len(state) > 2:
            pairs = zip(*map(jax.tree.leaves, (new_parts.params, parts.params)), strict=False)
            # By identity: in a trace, an updated parameter is another tracer.
            if all(new is old for new, old in pairs):
                raise ValueError(
                    f"{self.name} does not train the first model. Pass the trained model first."
                )
        if isinstance(view, View):
            new_view = self._new_view(new_parts.opt_state, view, new)
            new_parts = new_parts._replace(opt_state=new_view)
        if self.kind.any_pytree:
            new_parts = new_parts._replace(step=parts.step + 1)
        before: PyTreeDef = jax.tree.structure(parts)
        if before != jax.tree.structure(new_parts):
            raise self._changed(parts, new_parts)
        return new_parts, out

    def _new_state(
        self, state: tuple[PyTree, ...], out: PyTree
    ) -> tuple[tuple[PyTree, ...], PyTree]:
        """Takes the new state out of the results of the step."""

        def plain(tree: PyTree) -> PyTree:
            """Replaces each view in a tree by the optimizer state that it holds."""
            return jax.tree.map(
                lambda x: x.opt if isinstance(x, View) else x,
                tree,
                is_leaf=lambda x: isinstance(x, View),
            )

        in_step = self.kind.optimizer_in_step
        matches = self.kind.matches(plain(state) if in_step else state)
        if in_step:
            matches = [functools.partial(lambda test, x: test(plain(x)), test) for test in matches]
        found, rest = take_out(out, matches)
        if len(found) == len(state):
            if not self.kind.any_pytree and take_out(rest, matches)[0]:
                raise TypeError(
                    f"{self.name} returns two states ({summary(out)}). Return only the new one."
                )
            return tuple(found[i] for i in range(len(state))), rest
        leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, View | ZeroOptState))
        if in_step and any(isinstance(x, ZeroOptState) for x in leaves):
            raise TypeError(STARTS_AGAIN)  # under offload, the state in the step lacks arrays
        kinds = [
            type(x.opt if isinstance(x, View) else x).__name__
            for i, x in enumerate(state)
            if i not in found
        ]
        raise TypeError(
            f"{self.name} returned {summary(out)}, without the new state ({', '.join(kinds)}). "
            "Return the new state with the same tree, shapes and dtypes, or pass state_argnums."
        )

    def _new_view(self, opt_state: PyTree, old: View, new: tuple[PyTree, ...]) -> View:
        """Returns the view after the step, in which the step is counted."""
        if not self.kind.knows_parameters:
            opt = old.opt._replace(steps=old.opt.steps + 1)
            # The numbers of a wrapped optimizer in the state are those of the step.
            if (own := find_zero_state(new)) is not None:
                opt = opt._replace(
                    skipped=own.skipped, grad_norm=own.grad_norm, learning_rate=own.learning_rate
                )
            return dataclasses.replace(old, opt=opt)
        if isinstance(opt_state, View):
            view = dataclasses.replace(opt_state, update=None)
        elif isinstance(opt_state, ZeroOptState):  # of tx.init in the step
            view = dataclasses.replace(old, opt=opt_state)
        else:  # another optimizer returns optax's state
            view = old.around(opt_state)
        # The state's own optimizer counts its updates; a counter that it left alone is the same
        # tracer.
        if view.opt.steps is not old.opt.steps:
            return view
        unknown = jnp.full((), UNKNOWN, jnp.float32)
        opt = view.opt._replace(steps=old.opt.steps + 1, grad_norm=unknown)
        return dataclasses.replace(view, opt=opt)

    def _one_optimizer(
        self, update_view: Callable[..., tuple[PyTree, View]]
    ) -> Callable[..., tuple[PyTree, View]]:
        """Returns ``View.update`` for one wrapped optimizer."""
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
            return update_view(grads, view, params, **extra)

        return update

    def _changed(self, before: Parts, after: Parts) -> TypeError:
        """Returns the error of a step that changes the structure of its state, or a shape."""
        old, new = (
            {jax.tree_util.keystr(path): np.shape(x) for path, x in leaves}
            for leaves in map(jax.tree_util.tree_leaves_with_path, map(_by_name, (before, after)))
        )
        changes = [f"{x} left out" for x in old if x not in new]
        changes += [f"{x} added" for x in new if x not in old]
        changes += [f"{x} from {old[x]} to {new[x]}" for x in old if x in new and old[x] != new[x]]
        more = f"; {len(changes) - 4} more" if len(changes) > 4 else ""
        return TypeError(
            f"{self.name} changed the structure or the shapes of the state "
            f"({'; '.join(changes[:4]) or 'containers of other types'}{more}). Create the state "
            "with the structure and the shapes that the step returns."
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
        if [*map(np.shape, jax.tree.leaves(start))] != [*map(np.shape, jax.tree.leaves(new_parts))]:
            raise self._changed(start, new_parts)
        if not self.kind.knows_parameters:  # its updates have no marks
            return
        leaves = len(jax.tree.leaves(start.params))
        times, looped = count(jaxpr, GRADIENT)
        # An update marks as many gradients as it receives: of a subtree, fewer than all parameters.
        n = times // max(1, min(self._sizes, default=leaves))
        if not n + looped:
            sources = [*unchanged(jaxpr)]
            m = leaves + len(jax.tree.leaves(start.opt_state.inner))
            has_new_params = sources[:leaves] != [*range(leaves)]
            # A transformation without a state has none to update.
            has_new_state = m == leaves or sources[leaves:m] != [*range(leaves, m)]
            if not (has_new_params and has_new_state):
                raise ValueError(
                    f"{self.name} never updates the state. Call state.apply_gradients (NNX: "
                    "optimizer.update), or decorate a function without updates with zero.evaluate."
                )
            if self._needs_tx:
                raise ValueError(
                    f"{self.name} updates with an optimizer of its own, which does not apply "
                    f"{' and '.join(self._needs_tx)}. Call state.tx.update or "
                    "state.apply_gradients, or remove the keys from the config."
                )
            return
        if self.once and (n > 1 or looped):
            often = "in a loop" if looped else f"{n} times"
            update = next(filter(functools.partial(is_mark, name=GRADIENT), equations(jaxpr)))
            place = line(jaxprs.source(update).traceback)
            often += f" at {place}" if place else ""
            raise ValueError(f"{self.name} updates {often}, which {self.once}.")


def _by_name(parts: Parts) -> dict[str, PyTree]:
    """Returns the fields of a state by name."""
    return {name: x for name, x in (parts._asdict() | parts.rest).items() if name != "rest"}
