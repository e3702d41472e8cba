"""A call of a decorated function with sorted arguments, and the function called in that order.

Arrays among the further arguments are traced; everything else is part of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from zerojax.plan.layout import Spec
from zerojax.step.jitted import Slot
from zerojax.train_state.nnx import Settings, apply_settings, is_nnx, settings
from zerojax.train_state.results import ObjectPlaceholder
from zerojax.xla.types import PyTree


@jax.tree_util.register_static
class Constant:
    """A value that is part of the program, a pytree without leaves; compared by type and value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        # 1, 1.0 and True are equal, and make different programs.
        return isinstance(other, Constant) and type(self.value) is type(other.value) and bool(
            self.value == other.value
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """An argument of parameters that the step does not train, such as a teacher.

    Attributes:
      value: The argument.
      specs: The spec of each of its arrays; None for an array that is not sharded over ZeRO's axis.
        Empty before the step has read them from the arrays.
    """

    value: PyTree
    specs: tuple[Spec | None, ...] = field(default=(), metadata={"static": True})


Further = tuple[PyTree, ...]
"""The arguments beside the state and the batch, in the order of their parameters: arrays and
numbers, which are traced, and each other leaf in a :class:`Constant`."""


class Signature(NamedTuple):
    """The kind of each argument of a call, by its slot; hashable.

    Attributes:
      state: The state's objects, in order.
      batch: The batch.
      several: Whether the batch is the tuple of the arguments ``batch``, and not the only one.
      further: All other arguments, in order.
      batch_axis: The dimension of the batch's arrays that has the rows.
    """

    state: tuple[Slot, ...]
    batch: tuple[Slot, ...]
    several: bool
    further: tuple[Slot, ...]
    batch_axis: int


@dataclass(eq=False, slots=True)
class Known:
    """Knowledge of calls with equal types, trees, shapes, dtypes and shardings.

    Attributes:
      signature: What each argument is.
      checked: Whether a step has checked the batch and the further arguments of such a call.
      placed: Whether the batch of such a call is on the devices as a step needs it.
      names: The names of the leaves of the batch and of the further arguments, for messages; None
        before several processes have compared such a call.
      described: The dtype and shape of each of these leaves, by name, but of those that are static.
    """

    signature: Signature
    checked: bool = False
    placed: bool = False
    names: tuple[str, ...] | None = None
    described: dict[str, str] = field(default_factory=dict)


class Call(NamedTuple):
    """The arguments of one call, sorted.

    Attributes:
      objects: The state: one ``TrainState``, or all NNX objects in the order of the call.
      batch: One argument, or a tuple of the arguments that ``batch_argnums`` names.
      further: All other arguments, in order.
      known: What is known of such a call.
    """

    objects: tuple[PyTree, ...]
    batch: PyTree
    further: Further
    known: Known

    @property
    def signature(self) -> Signature:
        """The kind of each argument."""
        return self.known.signature


class RearrangedFunction:
    """A function called as ``(*objects, batch, *further)``, see :class:`Call`.

    Results that are NNX objects of the call are replaced by :class:`ObjectPlaceholder`.

    Args:
      function: The function.
      name: Its name for messages.
      positional: The names of the parameters that it takes by position.
      signature: What each argument is.

    Attributes:
      changed: Attributes of NNX objects that the function sets, as ``model.train()`` does, by the
        structure of :data:`Further` with which the function was traced.

    Raises:
      NameError: The function uses an axis name that only ``pmap`` would define.
    """

    function: Callable[..., PyTree]
    signature: Signature
    __name__: str

    def __init__(
        self,
        function: Callable[..., PyTree],
        name: str,
        positional: Sequence[str],
        signature: Signature,
    ) -> None:
        self.function, self.signature, self.__name__ = function, signature, name
        self.__wrapped__ = function  # where JAX looks for the names and the line of its errors
        self.changed: dict[PyTreeDef, Settings] = {}
        self._names = dict[Slot, str](enumerate(positional))

    def __call__(self, *given: PyTree) -> PyTree:
        signature, n = self.signature, len(self.signature.state)
        objects, batch, further = given[:n], given[n], given[n + 1 :]
        values = (*objects, *(batch if signature.several else (batch,)), *map(_opened, further))
        slots = (*signature.state, *signature.batch, *signature.further)
        passed = dict(zip(slots, values, strict=True))
        # Behind a parameter that has its default, arguments are passed by name.
        args = list[PyTree]()
        while len(args) in passed:
            args.append(passed.pop(len(args)))
        before = settings(objects)
        with _with_remedies(self.__name__, signature):
            out = self.function(*args, **{str(self._names.get(x, x)): v for x, v in passed.items()})
        if any(map(is_nnx, objects)):
            ids = {id(x): ObjectPlaceholder(i) for i, x in reversed([*enumerate(objects)])}
            out = jax.tree.map(lambda x: ids.get(id(x), x), out, is_leaf=is_nnx)
        after = settings(objects)
        self.changed[jax.tree.structure(further)] = {
            at: x for at, x in after.items() if at not in before or before[at] != x
        }
        return out

    def bring_up_to_date(self, call: Call) -> None:
        """Sets the attributes that the function has set on the NNX objects of a call."""
        # The function ran in the trace only: a later call would leave model.train() undone.
        if any(self.changed.values()):
            apply_settings(call.objects, self.changed[jax.tree.structure(call.further)])


@contextlib.contextmanager
def _with_remedies(name: str, signature: Signature) -> Iterator[None]:
    """Adds remedies to the errors of a function that names an axis that only a ``pmap`` has, that
    was called with the batch before the state, or that takes floating labels."""
    try:
        yield
    except (AttributeError, TypeError, LookupError) as error:
        if signature.batch and 0 not in signature.state and 0 in signature.batch:
            error.add_note(
                f"zerojax: {name} was called with the batch first, and the state after it. If it "
                f"is defined as {name}(state, batch), swap the arguments."
            )
        if any(x in str(error) for x in ("numpy.integer", "Indexer must")):  # optax's, and JAX's
            error.add_note("zerojax: if these are labels, pass labels.astype(np.int32).")
        raise
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise NameError(
            f"{name} names an axis of a pmap (jax.lax.pmean, psum, or axis_name of a layer). "
            "Remove it: a decorated step sees the global batch, so that its mean is over all "
            f"devices. JAX raised: {error}"
        ).with_traceback(error.__traceback__) from None  # with the user's line


def _opened(argument: PyTree) -> PyTree:
    """Returns an argument of :data:`Further` as the caller passed it."""
    value = argument.value if isinstance(argument, Frozen) else argument
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Constant) else x,
        value,
        is_leaf=lambda x: isinstance(x, Constant),
    )


def is_key(x: object) -> bool:
    """Returns whether an argument is one random key, typed or from ``jax.random.PRNGKey``."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None or isinstance(x, type):  # jnp.float32 has both
        return False
    typed = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    # A raw key has two words with threefry, and four with rbg.
    return (typed and shape == ()) or (dtype == np.uint32 and shape in ((2,), (4,)))


def is_array(x: object) -> bool:
    """Returns whether the step traces an argument: an array, abstract or not, or a number."""
    # A flag, such as train=True, decides in Python, so that it is part of the program.
    if isinstance(x, bool | str | type):
        return False
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return True
    # A config may have a dtype, and a dtype has a shape.
    return isinstance(x, int | float | complex) or (hasattr(x, "__array__") and hasattr(x, "dtype"))
