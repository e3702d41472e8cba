"""Where the arrays of a training state lie: born, placed, and kept there from step to step."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import arguments as several
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from programs import PROGRAMS, Program

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES = 8
P = PartitionSpec


def create(name: str) -> Any:
    """The state's maker, of a key."""
    return PROGRAMS[name].create


def arguments(name: str, step: int = 0) -> tuple[Any, ...]:
    return several(name, "float32", step + 1)[step]


KEY = jax.random.key(1)


@functools.cache
def made(name: str) -> Any:
    case = PROGRAMS[name]
    state = (nnx.jit if case.nnx else jax.jit)(create(name))(KEY)
    return nnx.split(state) if case.nnx else state


def unplaced(name: str) -> Any:
    """A state on one device, as a user has it before zerojax."""
    state = jax.tree.map(lambda x: x.copy(), made(name))
    return nnx.merge(*state) if PROGRAMS[name].nnx else state


def arrays(state: Any) -> list[jax.Array]:
    """Every array of a state, those of a model and its optimizer too."""
    if isinstance(state, tuple):
        return [x for part in state for x in jax.tree.leaves(nnx.state(part))]
    return jax.tree.leaves(state)


def parameters(state: Any) -> list[jax.Array]:
    params = nnx.state(state[0], nnx.Param) if isinstance(state, tuple) else state.params
    return jax.tree.leaves(params)


def specs(tree: Any) -> list[PartitionSpec]:
    return [trimmed(x.sharding) for x in jax.tree.leaves(tree)]


def trimmed(sharding: NamedSharding) -> PartitionSpec:
    entries = list(sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def copy(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in arrays(state)]


def assert_same(state: Any, before: list[np.ndarray]) -> None:
    for x, old in zip(arrays(state), before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), old)


class TestBorn:
    @pytest.mark.parametrize(
        ("name", "stage"), [("mlp", 1), ("mlp", 2), ("average_in_state", 3), ("nnx_mlp", 3)]
    )
    def test_each_device_has_an_eighth_of_each_leaf(self, name: str, stage: int) -> None:
        """All dimensions are multiples of eight, so all that is not a scalar is cut."""
        for x in arrays(zero_for(stage).init(create(name), KEY)):
            sizes = [shard.data.size for shard in x.addressable_shards]
            assert len(sizes) == DEVICES
            assert set(sizes) == {x.size // DEVICES if x.ndim else 1}

    def test_stage_0_is_replicated_everywhere(self) -> None:
        for x in arrays(zero_for(0).init(create("mlp"), KEY)):
            assert x.sharding.is_fully_replicated
            assert len(x.sharding.device_set) == DEVICES

    @pytest.mark.parametrize("name", ["mlp", "convnet", "frozen", "masked_decay"])
    def test_moments_lie_as_their_parameter(self, name: str) -> None:
        state = zero_for(3).init(create(name), KEY)
        placed = {
            jax.tree_util.keystr(path): x.sharding
            for path, x in jax.tree_util.tree_leaves_with_path(state.params)
        }
        found = 0
        for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
            owner = [p for p in placed if jax.tree_util.keystr(path).endswith(p)]
            if owner:
                assert x.sharding.is_equivalent_to(placed[owner[0]], x.ndim)
                found += 1
            else:
                assert x.ndim == 0
        assert found

    @pytest.mark.parametrize("stage", [1, 3])
    def test_no_device_ever_holds_the_model(self, stage: int) -> None:
        """Neither in the result nor while it is made: the program that makes it is partitioned."""
        zero = zero_for(stage)
        abstract = zero.abstract_state(create("mlp"), KEY)
        whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
        state = zero.init(create("mlp"), KEY)
        for device in jax.devices():
            held = sum(
                shard.data.nbytes
                for x in arrays(state)
                for shard in x.addressable_shards
                if shard.device == device
            )
            assert held < whole / DEVICES * 1.1
            # The plan leaves the step counter out.
            assert held == pytest.approx(zero.plan(state).bytes_per_device, abs=8)

    def test_optimizer_is_wrapped_once(self) -> None:
        zero = zero_for(3)
        state = zero.init(create("mlp"), KEY)
        assert zero.wrap(state.tx) is state.tx
        assert zero.wrap(optax.sgd(1.0)) is not None


class TestAbstract:
    @pytest.mark.parametrize(
        ("name", "bf16"),
        [
            ("mlp", True), ("vae_key_in_state", True), ("partitioned", True), ("frozen", False),
            ("nnx_mlp", False),
        ],
    )  # fmt: skip
    def test_as_born(self, name: str, bf16: bool) -> None:
        zero = zero_for(3, bf16=bf16, mesh=mesh_of(name))
        abstract = zero.abstract_state(create(name), KEY)
        state = zero.init(create(name), KEY)
        if not PROGRAMS[name].nnx:
            for made in (lambda x: x.params, lambda x: x.opt_state):
                assert jax.tree.structure(made(abstract)) == jax.tree.structure(made(state))
        for a, x in zip(arrays(abstract), arrays(state), strict=True):
            assert isinstance(a, jax.ShapeDtypeStruct)
            assert (a.shape, a.dtype) == (x.shape, x.dtype)
            assert x.sharding.is_equivalent_to(a.sharding, x.ndim)

    @pytest.mark.parametrize("name", ["mlp", "nnx_mlp"])
    def test_lowers_and_compiles(self, name: str) -> None:
        """From shapes alone; with abstract batches and concrete ones."""
        zero = zero_for(3)
        step = zero(PROGRAMS[name].step)
        abstract = zero.abstract_state(create(name), KEY)
        state = abstract if isinstance(abstract, tuple) else (abstract,)
        batch, *others = arguments(name)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        lowered = step.lower(*state, shapes, *others)
        assert isinstance(lowered, jax.stages.Lowered)
        assert lowered.compile().memory_analysis().argument_size_in_bytes > 0
        assert step.lower(*state, batch, *others).as_text() == lowered.as_text()


def mesh_of(name: str) -> Any:
    return zerojax.mesh(axes={"data": 2, "model": 4}) if PROGRAMS[name].axes else zerojax.mesh()


class TestPlaced:
    @pytest.mark.parametrize(
        ("name", "stage", "devices"),
        [("mlp", 0, 8), ("odd", 3, 8), ("vae_key_in_state", 3, 8), ("mlp", 1, 1)],
    )
    def test_the_users_own_arrays_stay_readable(self, name: str, stage: int, devices: int) -> None:
        """A plain state is copied on to the devices, and what was passed is still there."""
        state = unplaced(name)
        readable = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
        before = [np.array(jax.random.key_data(x) if is_key(x) else x) for x in readable]
        step = zero_for(stage, axes=devices)(PROGRAMS[name].step)
        new = step(state, *arguments(name))[0]
        step(new, *arguments(name, 1))
        for x, old in zip(readable, before, strict=True):
            assert not x.is_deleted()
            np.testing.assert_array_equal(jax.random.key_data(x) if is_key(x) else x, old)

    def test_a_step_counter_that_is_an_array(self) -> None:
        """As one comes from a checkpoint. The count of updates goes on from there."""
        state = unplaced("mlp").replace(step=jnp.int32(41))
        step = zero_for(1)(PROGRAMS["mlp"].step)
        for i in range(2):
            state, _ = step(state, *arguments("mlp", i))
        assert int(state.step) == int(zerojax.telemetry(state)["step"]) == 43

    def test_a_state_from_init_is_donated(self) -> None:
        zero = zero_for(3)
        state = zero.init(create("mlp"), KEY)
        zero(PROGRAMS["mlp"].step)(state, *arguments("mlp"))
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))

    def test_unless_told_otherwise(self) -> None:
        zero = zero_for(3, donate=False)
        state = zero.init(create("mlp"), KEY)
        before = copy(state)
        zero(PROGRAMS["mlp"].step)(state, *arguments("mlp"))
        assert_same(state, before)

    def test_nnx_objects_are_brought_up_to_date_in_place(self) -> None:
        model, optimizer = unplaced("nnx_mlp")
        kernel = model.first.kernel[...]
        before = np.array(kernel)
        step = zero_for(3)(PROGRAMS["nnx_mlp"].step)
        for i in range(2):
            step(model, optimizer, *arguments("nnx_mlp", i))
        assert int(optimizer.step[...]) == 2
        assert model.first.kernel[...].sharding.spec == P(None, "data")
        assert not np.array_equal(model.first.kernel[...], before)
        np.testing.assert_array_equal(kernel, before)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class TestKept:
    @pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 4), (3, 1)])
    def test_shardings_stay_over_steps(self, stage: int, accumulation: int) -> None:
        zero = zero_for(stage, k=accumulation)
        state = zero.init(create("average_in_state"), KEY)
        born = specs(state)
        step = zero(PROGRAMS["average_in_state"].step)
        for i in range(3):
            state, _ = step(state, *arguments("average_in_state", i))
            assert specs(state) == born

    @pytest.mark.parametrize(
        ("name", "born"), [("mlp", False), ("vae_key_in_state", True), ("nnx_norm", False)]
    )
    def test_compiles_once(self, name: str, born: bool) -> None:
        """Steps after the first trace nothing, however the state came."""
        case, traces = PROGRAMS[name], []

        def counted(*args: Any) -> Any:
            traces.append(1)
            return case.step(*args)

        zero = zero_for(2)
        step = zero(counted)
        state = zero.init(create(name), KEY) if born else unplaced(name)
        for i in range(3):
            if case.nnx:
                step(*state, *arguments(name, i))
            else:
                state, _ = step(state, *arguments(name, i))
        assert len(traces) == 1

    def test_a_state_changed_by_hand_goes_on(self) -> None:
        """``replace`` makes a new state, and a host array in it is placed."""
        zero = zero_for(3)
        step = zero(PROGRAMS["mlp"].step)
        state, _ = step(zero.init(create("mlp"), KEY), *arguments("mlp"))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.params)
        state, metrics = step(state.replace(params=zeros), *arguments("mlp"))
        targets = arguments("mlp")[0]["y"]
        np.testing.assert_allclose(metrics["loss"], np.mean(targets**2), rtol=1e-5)
        assert specs(state.params)[0] != P()


class TestBatch:
    def sees(self, zero: zerojax.Zero, batch: Any, *others: Any) -> Any:
        """How the batch lies inside the step."""
        seen = []

        def step(state: TrainState, batch: Any, *others: Any) -> Any:
            for x in jax.tree.leaves((batch, others)):
                jax.debug.inspect_array_sharding(x, callback=seen.append)
            grads = jax.tree.map(jnp.ones_like, state.params)
            return state.apply_gradients(grads=grads), jax.tree.map(lambda x: x, (batch, others))

        state = TrainState.create(apply_fn=None, params={"w": np.ones(8)}, tx=optax.sgd(1.0))
        out = zero(step)(state, batch, *others)[1]
        return seen, out

    def test_scalars_and_further_arguments_go_everywhere(self) -> None:
        batch = {"x": np.ones((16, 3), np.float32), "weight": np.float32(2)}
        seen, (out, others) = self.sees(zero_for(1), batch, np.arange(7.0), 3)
        assert float(out["weight"]) == 2
        assert int(others[1]) == 3
        assert [s.is_fully_replicated for s in seen] == [True, False, True, True]

    def test_any_pytree(self) -> None:
        """A placed batch is not used up."""
        x = np.arange(32.0, dtype=np.float32).reshape(16, 2)
        placed = jax.device_put(x, NamedSharding(zerojax.mesh(), P("data")))
        batch = {
            "tuple": (x, x), "list": [x], "placed": placed,
            "dataclass": optax.EmaState(jnp.zeros(()), x),
        }  # fmt: skip
        _, (out, _) = self.sees(zero_for(2), batch)
        jax.tree.map(np.testing.assert_array_equal, out, batch)
        assert not placed.is_deleted()

    def test_printing_from_a_step(self, capfd: pytest.CaptureFixture[str]) -> None:
        def step(state: TrainState, batch: Any) -> Any:
            jax.debug.print("sum is {}", batch.sum())
            return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)), None

        state = TrainState.create(apply_fn=None, params={"w": np.zeros(8)}, tx=optax.sgd(1.0))
        zero_for(3)(step)(state, np.ones(16, np.float32))
        jax.effects_barrier()
        assert "sum is 16.0" in capfd.readouterr().out


class TestPlan:
    def test_specs_of_a_stage(self) -> None:
        state = unplaced("mlp")
        whole = [P()] * 6
        cut = [P("data"), P(None, "data"), P("data"), P("data"), P("data"), P("data")]
        table = {0: (whole, whole), 1: (cut, whole), 2: (cut, cut), 3: (cut, cut)}
        for stage, (params, grads) in table.items():
            plan = zero_for(stage).plan(state)
            assert jax.tree.leaves(plan.params, is_leaf=is_spec) == params
            assert jax.tree.leaves(plan.grads, is_leaf=is_spec) == grads
            moments = jax.tree.leaves(plan.opt_state, is_leaf=is_spec)
            assert [spec for spec in moments if spec != P()] == [s for s in params * 2 if s != P()]

    @pytest.mark.parametrize("name", ["mlp", "nnx_mlp"])
    def test_of_born_abstract_and_plain_states_alike(self, name: str) -> None:
        zero = zero_for(3)
        born, abstract = zero.init(create(name), KEY), zero.abstract_state(create(name), KEY)
        plans = [zero.plan(state) for state in (unplaced(name), born, abstract)]
        leaves = [jax.tree.leaves(plan.params, is_leaf=is_spec) for plan in plans]
        assert leaves[0] == leaves[1] == leaves[2]
        assert P("data") in leaves[0]
        assert len({plan.bytes_per_device for plan in plans}) == 1
        assert len({str(plan) for plan in plans}) == 1

    def test_as_a_table(self) -> None:
        plan = zero_for(3, stage3_param_persistence_threshold=100).plan(unplaced("odd"))
        text = str(plan)
        assert "stage 3" in text
        assert "8 devices" in text
        assert "bytes/device" in text
        for word in ("params", "'kernel'", "11x13", "float32", "gradients", "optimizer state"):
            assert word in text
        assert "no dimension of (11, 13) is divisible by 8" in text
        assert "stage3_param_persistence_threshold" in text
        assert f"{plan.bytes_per_device / 1000:.3g} kB" in text

    def test_every_replicated_leaf_has_a_reason(self) -> None:
        for stage in (0, 1, 3):
            plan = zero_for(stage).plan(unplaced("convnet"))
            for group in plan.leaves.values():
                for leaf in group:
                    assert leaf.sharded != bool(leaf.reason), leaf
                    pieces = DEVICES if leaf.sharded else 1
                    whole = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
                    assert leaf.bytes_per_device * pieces == leaf.bytes == whole

    def test_defaults_of_a_json_are_told(self) -> None:
        text = str(zerojax.zero({"zero_optimization": {"stage": 2}}).plan(unplaced("mlp")))
        assert "gradient_clipping = 1.0" in text

    def test_the_users_axis_and_its_other_axes(self) -> None:
        plan = zero_for(3, mesh=mesh_of("partitioned")).plan(unplaced("partitioned"))
        assert "model" in str(plan)
        assert P("data", "model") in jax.tree.leaves(plan.params, is_leaf=is_spec)


def last_gradient(case: Program, state: Any, batch: Any) -> Any:
    """The plain gradient of a regression."""

    def loss(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

    return jax.grad(loss)(state.params)


class TestTelemetry:
    KEYS = ("loss_scale", "skipped_steps", "grad_norm", "learning_rate", "step")

    @pytest.mark.parametrize(
        ("stage", "accumulation"), [(2, 4), pytest.param(3, 1, marks=pytest.mark.slow)]
    )
    def test_values(self, stage: int, accumulation: int) -> None:
        zero = zero_for(stage, k=accumulation)
        plain = unplaced("mlp")
        state, _ = zero(PROGRAMS["mlp"].step)(plain, *arguments("mlp"))
        told = zerojax.telemetry(state)
        assert tuple(told) == self.KEYS
        assert all(isinstance(x, jax.Array) and x.shape == () for x in told.values())
        norm = optax.tree.norm(last_gradient(PROGRAMS["mlp"], plain, arguments("mlp")[0]))
        np.testing.assert_allclose(told["grad_norm"], norm, rtol=1e-5)
        assert float(told["loss_scale"]) == 1
        assert int(told["skipped_steps"]) == 0
        assert int(told["step"]) == 1

    def test_nnx(self) -> None:
        model, optimizer = zero_for(3).init(create("nnx_mlp"), KEY)
        zero_for(3)(PROGRAMS["nnx_mlp"].step)(model, optimizer, *arguments("nnx_mlp"))
        for holder in (optimizer, (model, optimizer)):
            told = zerojax.telemetry(holder)
            assert tuple(told) == self.KEYS
            assert int(told["step"]) == 1
            assert float(told["grad_norm"]) > 0

    def test_learning_rate_from_the_config(self) -> None:
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
        zero = zerojax.zero({"optimizer": optimizer, "scheduler": scheduler})
        schedule = zerojax.schedule(scheduler, 1e-2)
        tx = zero.optimizer()
        params = unplaced("mlp").params
        apply = unplaced("mlp").apply_fn
        state = zero.init(lambda: TrainState.create(apply_fn=apply, params=params, tx=tx))
        step = zero(PROGRAMS["mlp"].step)
        for i in range(3):
            state, _ = step(state, *arguments("mlp", i))
            np.testing.assert_allclose(
                zerojax.telemetry(state)["learning_rate"], schedule(i), rtol=1e-6
            )

    def test_learning_rate_of_the_users_own_optimizer(self) -> None:
        tx = optax.inject_hyperparams(optax.sgd)(0.25)
        state = TrainState.create(apply_fn=None, params={"w": np.zeros(8)}, tx=tx)

        @zero_for(1)
        def step(state: TrainState, batch: Any) -> Any:
            grads = jax.tree.map(jnp.ones_like, state.params)
            return state.apply_gradients(grads=grads), batch.sum()

        state, _ = step(state, np.ones(8))
        assert float(zerojax.telemetry(state)["learning_rate"]) == 0.25
        born = zero_for(1).init(create("mlp"), KEY)
        assert math.isnan(zerojax.telemetry(born)["learning_rate"])

    @pytest.mark.parametrize(
        ("stage", "accumulation"), [pytest.param(0, 1, marks=pytest.mark.slow), (3, 4)]
    )
    def test_clipping_is_that_of_optax(self, stage: int, accumulation: int) -> None:
        """Up to the 1e-6 that DeepSpeed adds to the norm."""
        limit = 0.1
        zero = zero_for(stage, gradient_clipping=limit, k=accumulation)
        sgd = optax.sgd(1.0)
        plain = unplaced("mlp")
        plain = plain.replace(tx=sgd, opt_state=sgd.init(plain.params))
        batch = arguments("mlp")[0]
        grads = last_gradient(PROGRAMS["mlp"], plain, batch)
        assert optax.tree.norm(grads) > limit
        clipped, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
        want = optax.apply_updates(plain.params, jax.tree.map(jnp.negative, clipped))
        state, _ = zero(PROGRAMS["mlp"].step)(plain, batch)
        for a, b in zip(parameters(state), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            zerojax.telemetry(state)["grad_norm"], optax.tree.norm(grads), rtol=1e-5
        )

    def test_of_a_plain_state(self) -> None:
        with pytest.raises(TypeError, match=r"zero\.init"):
            zerojax.telemetry(unplaced("mlp"))
