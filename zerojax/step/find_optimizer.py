"""The wrapped optimizer that a step closes over."""

from __future__ import annotations

from typing import NoReturn

import jax

from zerojax.optim.wrap import ZeroTransformation
from zerojax.step.call import Call, Further, RearrangedFunction
from zerojax.step.find_state import computed
from zerojax.step.view import View
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla.types import PyTree


def find_optimizer(step: RearrangedFunction, opened: OpenedState, call: Call) -> ZeroTransformation:
    """Traces a step up to its first update, and returns the optimizer that the update calls.

    Args:
      step: The step.
      opened: The step's state, which contains the state of a wrapped optimizer.
      call: The other arguments.

    Raises:
      ValueError: The step does not update that optimizer state.
    """

    def run(parts: Parts, batch: PyTree, further: Further) -> None:
        view = View(parts.opt_state, update=_stop)
        step(*opened.kind.close(parts._replace(opt_state=view), None), batch, *further)

    try:
        jax.eval_shape(run, jax.tree.map(computed, opened.parts), call.batch, call.further)
    except _Found as found:
        return found.tx
    raise ValueError(
        f"{step.__name__} never updates its optimizer state. Call tx.update(grads, opt_state, "
        "params) of zero.wrap(tx) or zero.optimizer()."
    )


class _Found(BaseException):
    """Ends the trace; user code does not catch a BaseException."""

    def __init__(self, tx: ZeroTransformation) -> None:
        self.tx = tx


def _stop(tx: ZeroTransformation, *_: object, **__: object) -> NoReturn:
    raise _Found(tx)
