"""Any pytree is saved, and restored at any stage, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from equal import zero_for
from train_state.test_pytree import BATCH, FORMS, new_state, train_state

from zerojax.checkpoint import Checkpointer, CheckpointError

pytestmark = pytest.mark.usefixtures("quick_compile")


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("form", ["arguments", "dict", "NamedTuple", "TrainStates"])
def test_is_restored_at_another_stage(form: str, tmp_path: Path) -> None:
    step, create = FORMS[form]
    zero, made = zero_for(3, small_array_size=0), create()
    state = new_state(form, zero(step)(*made, BATCH), len(made))
    saved = state if len(state) > 1 else state[0]
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, saved)
    other = zero_for(1, small_array_size=0)

    def start() -> Any:
        made = create()
        return made if len(made) > 1 else made[0]

    with Checkpointer(tmp_path, other) as checkpointer:
        # Where the arrays lie is told by the shapes, or by the plan.
        for like in (other.abstract_state(start), jax.eval_shape(start)):
            restored = checkpointer.restore(like)
            same(restored, saved)
            shapes = jax.tree.leaves(other.abstract_state(start))
            for x, y in zip(jax.tree.leaves(restored), shapes, strict=True):
                assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_parts_and_arrays_of_no_elements(tmp_path: Path) -> None:
    zero = zero_for(1)
    state = {"params": train_state(0).params, "empty": jax.numpy.zeros((0, 3))}
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        same(checkpointer.restore(jax.eval_shape(lambda: state)), state)
        params = checkpointer.restore(jax.eval_shape(lambda: state["params"]))
        same(params, state["params"])


def test_what_the_template_lacks_is_named(tmp_path: Path) -> None:
    zero = zero_for(1)
    state = {"params": train_state(0).params, "average": jax.numpy.ones(3)}
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        with pytest.raises(CheckpointError, match=r"only in the checkpoint: average \[3\] float32"):
            checkpointer.restore(jax.eval_shape(lambda: {"params": state["params"]}))


@pytest.mark.parametrize(
    ("value", "saved", "wanted"),
    [(300, "int32", "int8"), (-1, "int32", "uint32"), (1e6, "float32", "float16")],
)
def test_numbers_that_another_dtype_does_not_hold(
    value: float, saved: str, wanted: str, tmp_path: Path
) -> None:
    zero = zero_for(1)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, {"x": jax.numpy.array([0, value], saved), "y": jax.numpy.ones(2)})
        shapes = {
            "x": jax.ShapeDtypeStruct((2,), wanted),
            "y": jax.ShapeDtypeStruct((2,), "float16"),
        }
        with pytest.raises(
            CheckpointError, match=f"x does not fit into {wanted}: restore it as {saved}"
        ):
            checkpointer.restore(shapes)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(jax.random.key, jax.random.PRNGKey), (jax.random.PRNGKey, jax.random.key)],
)
def test_keys_and_their_data_are_not_taken_for_each_other(
    saved: Callable[[int], jax.Array], wanted: Callable[[int], jax.Array], tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, zero_for(1)) as checkpointer:
        checkpointer.save(1, {"key": saved(3)})
        says = r"key was saved as (key<fry>|uint32), .* (key<fry>|uint32): .* one kind of keys"
        with pytest.raises(CheckpointError, match=says):
            checkpointer.restore(jax.eval_shape(lambda: {"key": wanted(3)}))


@pytest.mark.parametrize(("saved", "wanted"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_pair_of_one_precision_is_restored_in_another(
    saved: str, wanted: str, tmp_path: Path
) -> None:
    def pair(zero: Any) -> Any:
        params = {"w": jax.numpy.ones((8, 16))}
        return params, zero.wrap(optax.adam(1e-2)).init(params)

    one, other = (zero_for(2, **{precision: True}) for precision in (saved, wanted))
    state = one.init(lambda: pair(one))
    with Checkpointer(tmp_path, one) as checkpointer:
        checkpointer.save(1, state)
    with Checkpointer(tmp_path, other, read_only=True) as checkpointer:
        params, opt_state = checkpointer.restore(other.abstract_state(lambda: pair(other)))
    same((params, opt_state.inner), (state[0], state[1].inner))
    assert (opt_state.loss_scale is None) == (wanted == "bf16")
    if wanted == "fp16":
        assert opt_state.loss_scale.scale == 2.0**16
