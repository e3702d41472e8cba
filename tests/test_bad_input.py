"""What cannot be trained is refused: the message names the fault and the remedy, and the state
that was passed is as it was."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS = 16


def make_state(**replaced: Any) -> TrainState:
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
    return state.replace(**replaced)


def good_step(state: TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch_of(rows: int = ROWS) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 8), np.float32)}


def refuses(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    kind: type[Exception],
    *says: str,
) -> None:
    """The call fails as told, and leaves every array of the state alone."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    before = [(np.array(x), x.sharding) for x in arrays]
    with pytest.raises(kind) as caught:
        step(state, batch)
    assert len(str(caught.value)) < 600
    for word in says:
        assert re.search(word, str(caught.value)), str(caught.value)
    for x, (value, sharding) in zip(arrays, before, strict=True):
        assert not x.is_deleted()
        assert x.sharding == sharding
        np.testing.assert_array_equal(x, value)


class TestBatch:
    @pytest.mark.parametrize(
        ("batch", "says"),
        [
            (batch_of(12), ["leading dimension 12", "divisible by 8", "Use 8 or 16"]),
            ({"x": np.ones((0, 8))}, ["empty", "leading dimension"]),
            ({"x": np.float32(1), "y": 2}, ["only scalars", "'x'", "'y'"]),
            ([3.0], ["scalar"]),
        ],
    )
    def test_that_does_not_fit(self, batch: Any, says: list[str]) -> None:
        zero = zero_for(3)
        state = zero.init(make_state)
        step = zero(good_step)
        refuses(step, state, batch, ValueError, *says)
        if len(says) == 3:  # and the next batch is trained on
            step(state, batch_of())

    def test_with_a_dimension_before_the_rows(self) -> None:
        step = zerojax.zero(stage=2, gradient_accumulation_steps=4)(good_step)
        batch = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch_of(32))
        refuses(
            step, make_state(), batch, ValueError,
            "leading dimension 8 is not divisible by 32", r"x\.reshape\(-1",
        )  # fmt: skip

    def test_whose_rows_disagree_cut_into_micro_batches(self) -> None:
        step = zerojax.zero(stage=2, gradient_accumulation_steps=2)(good_step)
        batch = {"x": np.ones((16, 8)), "y": np.ones(8)}
        refuses(
            step, make_state(), batch, ValueError,
            "arrays differ", r"'x'.*16", r"'y'.*8", "argument", "gradient_accumulation_steps to 1",
        )  # fmt: skip

    @pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0)])
    def test_that_is_a_random_key(self, key: jax.Array) -> None:
        def noisy(state: TrainState, key: jax.Array, batch: Any) -> Any:
            return good_step(state, {"x": batch["x"] + jax.random.normal(key, batch["x"].shape)})

        zero = zerojax.zero(stage=3)
        zero(noisy)(make_state(), key, batch_of())
        zero(noisy, batch_argnums=2)(make_state(), key, batch_of())
        step = zerojax.zero(stage=3, gradient_accumulation_steps=2)(good_step)
        refuses(step, make_state(), key, ValueError, "takes no batch")


class TestState:
    @pytest.mark.parametrize("field", ["tx", "params", "opt_state"])
    def test_with_a_field_that_is_none(self, field: str) -> None:
        step = zerojax.zero(stage=3)(good_step)
        refuses(step, make_state(**{field: None}), batch_of(), (TypeError, ValueError), field)

    def test_without_arrays_that_init_makes(self) -> None:
        zero = zerojax.zero(stage=3)
        for make in (zero.init, zero.abstract_state):
            with pytest.raises(TypeError, match=r"NoneType.* has no arrays"):
                make(lambda: None)
            with pytest.raises(TypeError, match=r"a set at \[0\]\['names'\].*hashable"):
                make(lambda: {"w": jnp.ones(8), "names": {"net"}})

    def test_that_lies_on_another_mesh(self) -> None:
        """Placed by another zero, on other devices or in another order."""
        four = zerojax.mesh(4)
        turned = Mesh(np.array(jax.devices()[::-1]), ("data",))
        step = zero_for(3)(good_step)
        for mesh in (four, turned):
            other = zero_for(3, mesh=mesh)
            refuses(
                step, other.init(make_state), batch_of(), ValueError,
                "another mesh", "params", r"zero\.init|device_get",
            )  # fmt: skip

    def test_whose_own_spec_names_an_axis_that_is_not_there(self) -> None:
        specs = {"w": PartitionSpec(None, "model"), "b": PartitionSpec()}
        zero = zerojax.zero(stage=3, specs=specs)
        refuses(
            zero(good_step), make_state(), batch_of(), ValueError,
            r"params\['w'\]", "'model'", "mesh",
        )  # fmt: skip


def gradients(state: TrainState, batch: Any) -> Any:
    return state.params, good_step(state, batch)[1]


def never(state: TrainState, batch: Any) -> Any:
    return state, jnp.mean(batch["x"])


def by_hand(state: TrainState, batch: Any) -> Any:
    """Updates the parameters, but not by way of the optimizer."""
    params = jax.tree.map(lambda p: p * 0.9, state.params)
    return state.replace(params=params), jnp.mean(batch["x"])


def other_structure(state: TrainState, batch: Any) -> Any:
    new, loss = good_step(state, batch)
    return new.replace(params=new.params | {"extra": jnp.ones(3)}), loss


class TestStep:
    @pytest.mark.parametrize(
        ("step", "kind", "says"),
        [
            (gradients, TypeError, ["a tuple of dict, array, without the new state"]),
            (by_hand, ValueError, ["apply_gradients", "never"]),
            (other_structure, TypeError, ["structure", r"\['params'\]\['extra'\] added"]),
        ],
    )
    def test_that_does_not_train(self, step: Any, kind: type[Exception], says: list[str]) -> None:
        zero = zero_for(3, k=2)
        refuses(zero(step), make_state(), batch_of(), kind, step.__name__, *says)

    def test_that_does_not_train_a_state_from_init(self) -> None:
        """A state that would be donated is not gone either."""
        zero = zero_for(3)
        state = zero.init(make_state)
        refuses(zero(never), state, batch_of(), ValueError, "apply_gradients")
        zero(good_step)(state, batch_of())

    def test_in_nnx_that_never_updates(self) -> None:
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        kernel = model.kernel[...]
        before = np.array(kernel)
        step = zerojax.zero(stage=3)(lambda model, optimizer, batch: jnp.mean(model(batch["x"])))
        with pytest.raises(ValueError, match=r"optimizer\.update"):
            step(model, optimizer, batch_of())
        assert model.kernel[...] is kernel
        np.testing.assert_array_equal(kernel, before)
        assert int(optimizer.step[...]) == 0


class TestZero:
    def test_no_devices(self) -> None:
        with pytest.raises(ValueError, match="0 devices"):
            zerojax.mesh(devices=0)

    @pytest.mark.parametrize(
        ("keywords", "says"),
        [
            ({"replicas": 3}, "replicas=3 does not divide 8 devices.*pass 2 or 4"),
            ({"replicas": "nodes"}, "replicas='nodes': pass a number .* or \"hosts\""),
            ({"replicas": 2, "axes": {"data": 8}}, r"replicas=2 and axes=.*pass one.*'replica'"),
        ],
    )
    def test_replicas_that_do_not_divide(self, keywords: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            zerojax.mesh(**keywords)

    @pytest.mark.parametrize("name", ["replicas", "dcn"])
    def test_a_replica_axis_by_another_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"the batch over '{name}'.*groups 'replica'"):
            zerojax.zero(stage=3, mesh=zerojax.mesh(axes={name: 2, "data": 4}))

    def test_a_data_axis_by_another_name(self) -> None:
        with pytest.raises(ValueError, match=r"'dp'.*Name the axis of the batch 'data'"):
            zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"dp": 4, "tp": 2}))

    def test_an_axis_that_cuts_nothing(self) -> None:
        mesh = zerojax.mesh(axes={"data": 2, "fsdp": 4})
        with pytest.raises(ValueError, match=r"axis 'data', and this mesh has 'fsdp'.*'replica'"):
            zerojax.zero(stage=3, mesh=mesh).plan(make_state())

    def test_replicas_alone(self) -> None:
        says = r"shards over the mesh axis 'data'.*Rename.*axes=\{'data': 1, 'replica': 8\}"
        mesh = zerojax.mesh(axes={"replica": 8})
        with pytest.raises(ValueError, match=says):
            zerojax.zero(stage=3, mesh=mesh)

    @pytest.mark.parametrize(
        ("size", "axes", "says"),
        [
            (3, None, r"mics_shard_size = 3 does not divide the 8 devices.*one of \[1, 2, 4, 8\]"),
            (4, {"data": 8}, r"mics_shard_size = 4.*groups of 8.*zerojax\.mesh\(replicas=2\)"),
            (4, {"replica": 4, "data": 2}, "mics_shard_size = 4.*groups of 2.*remove one"),
            (-2, None, r"mics_shard_size: expected -1 \(off\) or a number of devices, got -2"),
        ],
    )
    def test_a_shard_group_of_another_size(self, size: int, axes: Any, says: str) -> None:
        mesh = None if axes is None else zerojax.mesh(axes=axes)
        with pytest.raises(zerojax.ConfigError, match=says):
            zerojax.zero({"zero_optimization": {"stage": 3, "mics_shard_size": size}}, mesh=mesh)

    @pytest.mark.parametrize(
        ("stages", "axes", "says"),
        [
            (3, None, r"stages = 3 does not divide the 8 data-parallel .* one of \[1, 2, 4, 8\]"),
            (4, {"data": 8}, r"has no pipeline stages: .*axes=\{'stage': 4, 'data': 2\}"),
            (1, {"stage": 2, "data": 4}, "pipeline.stages = 1, and .* has 2 pipeline stages"),
            (None, {"stage": 8}, r"mesh axis 'data'.*add it: axes=\{'data': 1, 'stage': 8\}"),
        ],
    )
    def test_other_pipeline_stages(self, stages: int | None, axes: Any, says: str) -> None:
        mesh = None if axes is None else zerojax.mesh(axes=axes)
        with pytest.raises(ValueError, match=says):
            zerojax.zero({"pipeline": {"stages": stages}}, mesh=mesh)
