"""Several processes, each with its own rows, compute what one process computes on all rows.

The eight devices and their programs are the same. Single bits differ, as gloo adds up losses and
gradients of several processes in another order than XLA does in one. In fp32 that is 1e-7 of a
sum. In fp16 gradients are summed in fp16, as DeepSpeed sums them, where another order is 5e-4 of a
sum: after 20 steps 7e-5 of a loss and 2e-3 of a parameter. So that no fault hides behind these,
one row or two count in a step of fp16, other ones in each step: sums of two numbers and of zeros
are the same in every order, and the runs are equal bit by bit.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

ROWS, STEPS, BAD_STEP = 32, 20, 6
ADAMW, CLIPPING = optax.adamw(3e-3, weight_decay=0.1), 0.5

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_processes")


class Setting(NamedTuple):
    """What is trained, and how.

    Attributes:
      kind: "linen" or "nnx".
      away: What lies in host memory or on a disk.
    """

    kind: str
    stage: int
    fp16: bool = False
    accumulation: int = 1
    away: str = ""

    def __str__(self) -> str:
        words = [f"{self.kind} at stage {self.stage}", "fp16" if self.fp16 else "fp32"]
        words += [f"{self.accumulation} micro-batches"] * (self.accumulation > 1)
        return ", ".join(words + [self.away] * bool(self.away))

    def zero(self, folder: str) -> zerojax.Zero:
        options: dict[str, Any] = {"gradient_accumulation_steps": self.accumulation}
        if self.fp16:  # the scale overflows at first, and doubles later on
            options |= {"fp16": True, "initial_scale_power": 17, "hysteresis": 1}
            options |= {"loss_scale_window": 5}
        else:
            options["gradient_clipping"] = CLIPPING  # by a norm that is a sum over all processes
        place = {"device": "nvme", "nvme_path": folder} if "disk" in self.away else "cpu"
        if self.away:
            options["offload_optimizer"] = place
        if "parameters" in self.away:
            options["offload_param"] = place
        return zerojax.zero(stage=self.stage, stage3_param_persistence_threshold=0, **options)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Global ones; in fp16 one row of one of them overflows."""
        rng = np.random.default_rng(0)
        for step in range(STEPS):
            x, y, weights = rng.normal(size=(ROWS, 16)), rng.normal(size=(ROWS, 8)), np.ones(ROWS)
            if self.fp16 and step == BAD_STEP:
                x[-1] *= 1e30
            if self.fp16:
                # The second may be in the first's micro-batch or not: sums of both would differ.
                rows = [7 * step % ROWS, (7 * step + ROWS // 2) % ROWS][: 3 - self.accumulation]
                weights = np.isin(np.arange(ROWS), rows) * ROWS / len(rows)
            batch = {"x": x, "y": y, "weights": weights}
            yield {name: values.astype(np.float32) for name, values in batch.items()}


class Trajectory(NamedTuple):
    """What a run leaves.

    Attributes:
      losses: float [STEPS].
      told: Skipped steps and the loss scale, in fp16.
      pieces: The shape of each parameter, and the process's own pieces with their indices.
    """

    losses: list[float]
    told: dict[str, float]
    pieces: dict[str, tuple[tuple[int, ...], list[tuple[Any, np.ndarray]]]]


class Linen(nn.Module):
    """[rows, 16] to [rows, 8]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.tanh(nn.Dense(32)(x)))


class Nnx(nnx.Module):
    """[rows, 16] to [rows, 8]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def create_linen(tx: Any = ADAMW) -> TrainState:
    params = Linen().init(jax.random.key(0), jnp.ones((1, 16)))["params"]
    return TrainState.create(apply_fn=Linen().apply, params=params, tx=tx)


def create_nnx(tx: Any = ADAMW) -> tuple[Nnx, nnx.Optimizer]:
    model = Nnx(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def weighted(prediction: jax.Array, batch: Any) -> jax.Array:
    squares = (prediction.astype(jnp.float32) - batch["y"]) ** 2
    return jnp.mean(squares * batch["weights"][:, None])


def linen_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"].astype(params["Dense_0"]["bias"].dtype)
        return weighted(state.apply_fn({"params": params}, x), batch)

    loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def nnx_step(model: Nnx, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    def loss_fn(model: Nnx) -> jax.Array:
        return weighted(model(batch["x"].astype(model.first.bias.dtype)), batch)

    loss, grads = zerojax.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def trained(zero: Any, batches: Iterator[Any], kind: str) -> Trajectory:
    losses = []
    if kind == "linen":
        step, state = zero(linen_step), zero.init(create_linen)
        for batch in batches:
            state, loss = step(state, batch)
            losses.append(loss)
        params = state.params
    else:
        step, (model, state) = zero(nnx_step), zero.init(create_nnx)
        losses = [step(model, state, batch) for batch in batches]
        params = nnx.to_pure_dict(nnx.state(model))
    told = zerojax.telemetry(state) if isinstance(zero, zerojax.Zero) else {}
    return Trajectory(
        [float(x) for x in losses],
        {name: float(told[name]) for name in ("skipped_steps", "loss_scale") if name in told},
        {
            jax.tree_util.keystr(path): (x.shape, own_pieces(x))
            for path, x in jax.tree_util.tree_leaves_with_path(params)
        },
    )


def own_pieces(x: Any) -> list[tuple[Any, np.ndarray]]:
    """Of an array on the devices, or on a disk."""
    if isinstance(x, jax.Array):
        return [(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards]
    indices = x.sharding.addressable_devices_indices_map(x.shape).values()
    return [(index, x.read_slice(index)) for index in indices]


def trajectory(setting: Setting) -> Trajectory:
    """Twenty steps, each with the process's own rows."""
    own = zerojax.process_rows(ROWS)
    batches = ({name: x[own] for name, x in batch.items()} for batch in setting.batches())
    with tempfile.TemporaryDirectory() as folder:
        return trained(setting.zero(folder), batches, setting.kind)


def trajectories(process: int, settings: Sequence[Setting]) -> list[Trajectory]:
    return [*map(trajectory, settings)]


of_one_process = functools.cache(trajectory)


def parameters(of_each_process: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Whole ones; NaN where no process has a piece."""
    whole: dict[str, np.ndarray] = {}
    for each in of_each_process:
        for name, (shape, pieces) in each.pieces.items():
            array = whole.setdefault(name, np.full(shape, np.nan))
            for index, piece in pieces:
                array[index] = piece
    return whole


def off(got: Any, want: Any, unit: Any) -> float:
    """The largest difference, in ``unit``; inf where one is NaN and the other is not."""
    got, want = np.asarray(got), np.asarray(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0, np.nan_to_num(abs(got - want) / unit, nan=np.inf))))


class Distance(NamedTuple):
    """Of losses, each to its own size, and of parameters, each to the largest of its array."""

    losses: float
    parameters: float


def distance(several: Sequence[Trajectory], one: Trajectory) -> Distance:
    found, wanted = parameters(several), parameters([one])
    return Distance(
        max(off(each.losses, one.losses, np.abs(one.losses)) for each in several),
        max(off(found[name], x, abs(x).max()) for name, x in wanted.items()),
    )


def fault(setting: Setting, several: Sequence[Trajectory], one: Trajectory) -> str:
    """What is too far off; empty where nothing is."""
    apart = distance(several, one)
    bounds = SAME if setting.fp16 else EQUAL
    if apart.losses > bounds.losses or apart.parameters > bounds.parameters:
        return f"{setting}: losses {apart.losses:.1e}, parameters {apart.parameters:.1e} off"
    told = [each.told for each in several if each.told != one.told]
    return f"{setting}: {told[0]}, and {one.told} of one process" if told else ""


SAME, EQUAL = Distance(0, 0), Distance(1e-6, 1e-5)
EVERY_STAGE = [
    Setting(kind, stage, fp16, 1 + (stage + fp16) % 2)
    for stage in range(4)
    for fp16 in (False, True)
    for kind in [("linen", "nnx")[(stage // 2 + fp16) % 2]]
]
SOME = [
    Setting("linen", 2),
    Setting("nnx", 3, True, 2),
    Setting("linen", 3, False, 2, "optimizer and parameters"),
]


class Plain(NamedTuple):
    """Plain JAX in place of ``zerojax.zero``, on one device."""

    jit: Callable[..., Any]

    def __call__(self, step: Callable[..., Any]) -> Any:
        return self.jit(step)

    def init(self, create: Callable[..., Any]) -> Any:
        return create(optax.chain(optax.clip_by_global_norm(CLIPPING), ADAMW))


@pytest.mark.parametrize(("kind", "jit"), [("linen", jax.jit), ("nnx", nnx.jit)])
def test_one_process_is_near_plain_jax(kind: str, jit: Callable[..., Any]) -> None:
    setting = Setting(kind, 3)
    plain = trained(Plain(jit), setting.batches(), kind)
    apart = distance([of_one_process(setting)], plain)
    assert apart.losses <= EQUAL.losses
    assert apart.parameters <= EQUAL.parameters


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        pytest.param(2, SOME, id="2"),
        pytest.param(4, EVERY_STAGE, id="4", marks=pytest.mark.sweep),
    ],
)
def test_trajectories_are_those_of_one_process(
    count: int, settings: list[Setting], in_processes: Callable[..., list[Any]]
) -> None:
    by_process = in_processes(count, trajectories, settings)
    by_setting = zip(settings, zip(*by_process, strict=True), strict=True)
    found = [fault(x, several, of_one_process(x)) for x, several in by_setting]
    assert not any(found), "\n".join(filter(None, found))


def test_overflows_are_skipped() -> None:
    """By the runs above: at first, as the scale is too large, and by one row later on."""
    run = of_one_process(SOME[1])
    assert run.told["skipped_steps"] >= 2
    assert np.isfinite(run.losses).sum() == STEPS - 1
    assert not np.isfinite(run.losses[BAD_STEP])
