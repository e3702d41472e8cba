"""Steps of several processes, each with its own rows, compute what one process computes on all of
them, on the same number of devices."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from groups import LIMIT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.launch.job import free_port

ROWS, STEPS = 32, 3

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_processes")


@pytest.fixture
def environment_of() -> Callable[[int], dict[str, str]]:
    """Of one of two processes, as torchrun sets it."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    common |= {"LOCAL_WORLD_SIZE": "2", "JAX_NUM_CPU_DEVICES": "2"}
    common |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    return lambda i: {**os.environ, **common, "RANK": str(i), "LOCAL_RANK": str(i)}


def rows_of(seed: int, count: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = rng.integers(2, size=count)
    mask[0] = 1
    return {"x": rng.normal(size=(count, 16)).astype(np.float32), "mask": mask}


def cut(batch: Any, mesh: Any = None) -> Any:
    """The process's own rows of a global batch."""
    return jax.tree.map(lambda x: x[zerojax.process_rows(len(x), mesh)], batch)


def masked(batch: Any, losses: jax.Array) -> jax.Array:
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def create_state(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (16, 8))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def train_step(state: TrainState, batch: Any, scale: Any = 1.0) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        losses = scale * jnp.square(batch["x"] @ params["w"]).mean(axis=-1)
        return masked(batch, losses), losses

    (loss, losses), grads = zerojax.value_and_grad(loss_fn, has_aux=True)(state.params)
    results = {"loss": loss, "rows": losses, "columns": batch["x"].T}
    return state.apply_gradients(grads=grads), results


def create_model() -> tuple[nnx.Module, nnx.Optimizer]:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_step(model: Any, optimizer: Any, batch: Any) -> Any:
    def loss_fn(model: Any) -> tuple[jax.Array, jax.Array]:
        losses = jnp.square(model(batch["x"])).mean(axis=-1)
        return masked(batch, losses), losses

    (loss, losses), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return {"loss": loss, "rows": losses}


def gathered(x: Any, mesh: Any) -> Any:
    """Results on the host, in every process."""
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)).tolist(), gathered)


def trained(zero: zerojax.Zero, kind: str, feed: Callable[..., Any] = cut) -> Any:
    """Results of three steps, in two micro-batches each."""
    if kind == "linen":
        step, state = zero(train_step), zero.init(create_state, jax.random.key(0))
    else:
        step, state = zero(nnx_step), zero.init(create_model)
    found = []
    for seed in range(STEPS):
        batch = feed(rows_of(seed), zero.mesh)
        if kind == "linen":
            state, results = step(state, batch, np.float32(0.5))
        else:
            results = step(*state, batch)
        found.append(results)
    return gathered(found, zero.mesh)


def at_stage(stage: int, mesh: Any = None, **more: Any) -> zerojax.Zero:
    options = {"gradient_accumulation_steps": 2, "stage3_param_persistence_threshold": 0} | more
    return zerojax.zero(stage=stage, mesh=mesh, **options)


def as_global(batch: Any, mesh: Any) -> Any:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    make = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: make(sharding, x), cut(batch, mesh))


def mixed(batch: Any, mesh: Any) -> Any:
    """A global array beside own rows, some of them on the process's first device."""
    return {"x": as_global(batch, mesh)["x"], "mask": jnp.asarray(cut(batch, mesh)["mask"])}


def by_replicas() -> Any:
    return zerojax.mesh(replicas=2)


def by_model() -> Any:
    """Two rows of devices; of four processes two share each."""
    return zerojax.mesh(axes={"data": 2, "model": 4})


def evaluated(counts: list[int]) -> Any:
    """Results for numbers of rows that divide among devices and micro-batches, and that do not;
    of a function that goes row by row, and of one that takes all rows together."""
    zero = zerojax.zero(stage=3, train_micro_batch_size_per_gpu=2)
    state = zero.init(create_state, jax.random.key(0))

    @zero.evaluate
    def each(state: TrainState, batch: Any) -> Any:
        values = batch["x"] @ state.params["w"]
        return {"rows": values, "mean": masked(batch, values.mean(axis=-1))}

    @zero.evaluate
    def together(state: TrainState, batch: Any) -> Any:
        return jax.lax.cummax(batch["x"] @ state.params["w"], axis=0)

    batches = [cut(rows_of(0, count)) for count in counts]
    return gathered([f(state, x) for f in (each, together) for x in batches], zero.mesh)


def scanned(state: TrainState, batch: Any) -> Any:
    """Updates on batches [steps, rows, ...]."""
    return jax.lax.scan(train_step, state, batch)


def stacked() -> Any:
    """The results of a step with three updates."""
    zero = at_stage(3, gradient_accumulation_steps=1)
    state = zero.init(create_state, jax.random.key(0))
    parts = [cut(rows_of(seed)) for seed in range(STEPS)]
    batch = jax.tree.map(lambda *parts: np.stack(parts), *parts)
    return gathered(zero(scanned, batch_axis=1)(state, batch)[1], zero.mesh)


def across() -> Any:
    """Two processes cut the model between them, and have all rows both."""
    return zerojax.mesh(axes={"model": 2, "data": 4})


def everything(process: int, counts: Sequence[int]) -> Any:
    """The results of every case; of evaluations for batches of these numbers of rows."""
    results = {f"{kind} in micro-batches": trained(at_stage(3), kind) for kind in ("linen", "nnx")}
    results["replica groups"] = trained(at_stage(3, by_replicas()), "linen")
    results["a model axis"] = trained(at_stage(1, by_model()), "linen")
    results["a model axis across processes"] = trained(at_stage(1, across()), "linen")
    results["global batch"] = trained(at_stage(2, gradient_accumulation_steps=1), "linen")
    results["global arrays"] = trained(at_stage(2), "linen", as_global)
    results["mixed"] = trained(at_stage(2), "linen", mixed)
    results["batches stacked by step"] = stacked()
    results["clipped"] = trained(at_stage(2, gradient_clipping=0.1), "nnx")
    results["state in host memory"] = trained(at_stage(3, **AWAY), "linen")
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder}
        results["optimizer on a disk"] = trained(at_stage(3, offload_optimizer=disk), "linen")
    results["fp16"] = trained(at_stage(1, fp16=True, initial_scale_power=8), "linen")
    results["evaluation"] = evaluated(counts)
    return results


AWAY: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}


def leaves(results: Any) -> Any:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(results)])


COUNTS = [32, 12, 36]


def test_own_rows_give_the_results_of_one_process(
    in_processes: Callable[..., list[Any]],
) -> None:
    alone = everything(0, COUNTS)
    for found in in_processes(2, everything, COUNTS):
        for case, results in found.items():
            assert jax.tree.structure(results) == jax.tree.structure(alone[case])
            # gloo adds up in another order than XLA, which fp16 shows.
            near = 2e-3 if case == "fp16" else 1e-6
            np.testing.assert_allclose(
                leaves(results), leaves(alone[case]), rtol=near, atol=near, err_msg=case
            )


def refused(process: int) -> dict[str, str]:
    """What the errors of wrong batches say."""
    state, said = None, {}

    def attempt(name: str, batch: Any, *more: Any, **options: Any) -> None:
        nonlocal state
        zero = zerojax.zero(stage=1, **options)
        state = zero.init(create_state, jax.random.key(0)) if state is None else state
        try:
            zero(train_step)(state, batch, *more)
        except ValueError as error:
            said[name] = str(error)

    attempt("unequal", rows_of(0, 8 + 8 * process))
    attempt("the global batch", rows_of(0), train_batch_size=ROWS)
    attempt("other than the config", rows_of(0, 24), train_batch_size=ROWS)
    attempt("not divisible", rows_of(0, 9))
    attempt("uneven leaves", {**rows_of(0, 8), "weights": np.ones(3)})
    attempt("an argument", rows_of(0, 8), np.ones(8), gradient_accumulation_steps=2)
    parts = jax.tree.map(lambda x: x[None], rows_of(0))
    try:
        zero = zerojax.zero(stage=1, train_batch_size=ROWS)
        zero(scanned, batch_axis=1)(create_state(jax.random.key(0)), parts)
    except ValueError as error:
        said["the global batch, stacked"] = str(error)
    alternating = jax.sharding.Mesh(np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]], "data")
    state = None
    attempt("alternating devices", rows_of(0, 8), mesh=alternating)
    try:
        zerojax.process_rows(33)
    except ValueError as error:
        said["no slice"] = str(error)
    return said


def test_wrong_rows_are_refused_in_every_process(
    in_processes: Callable[..., list[Any]],
) -> None:
    one, other = in_processes(2, refused)
    assert one == other
    assert {name: part for name, part in SAID.items() if part not in one.get(name, "")} == {}


SAID = {
    "unequal": "train_step: the processes pass different arguments at call 1: batch['mask'] is "
    "int32[8] in process 0, int32[16] in process 1, and 1 more differs.",
    "the global batch": "the batch has 64 rows (32 in each of 2 processes), but "
    "train_batch_size is 32. Pass only the process's own rows: batch[zerojax.process_rows(32)]",
    "the global batch, stacked": "Pass only the process's own rows: batch[:, "
    "zerojax.process_rows(32)]",
    "other than the config": "the batch has 48 rows (24 in each of 2 processes), but "
    "train_batch_size is 32",
    "not divisible": "leading dimension 18 (9 in each of 2 processes) is not divisible by 8 (8 "
    "devices). Use 8 or 12 rows in each process",
    "uneven leaves": "disagree on the leading dimension: {\"['mask']\": (8,), "
    "\"['weights']\": (3,)",
    "an argument": "has the shape (8,), with the 8 rows of the batch, which has 2 micro-batches",
    "alternating devices": "on this mesh a process has no block of neighbouring rows",
    "no slice": "33 rows do not divide among 2 processes: use 32 or 34",
}


CHANGES = """
import sys, time
import numpy as np
import zerojax
from zerojax.distributed import coordinator
part = coordinator.part
# Process 0 waits until the other has said why it ends.
coordinator.part = lambda me, others, _: part(me, others, 600.0)
zerojax.init_distributed()
sys.path.insert(0, sys.argv[1])
from test_processes import create_state, rows_of, train_step
import jax

zero = zerojax.zero(stage=3)
step, state = zero(train_step), zero.init(create_state, jax.random.key(0))
process = jax.process_index()
for at, rows in enumerate([8, 8, 16, 16, 8, 8, 8, 8]):
    batch = rows_of(at, rows)
    if process == int(sys.argv[3]) and at == 5:
        time.sleep(3)  # the other's script has ended
        batch = rows_of(at, 24) if sys.argv[2] == "rows" else {**batch, "x": np.float16(batch["x"])}
    state, results = step(state, batch)
    print("step", at + 1, flush=True)
"""


@pytest.mark.parametrize(
    ("what", "where", "says"),
    [
        ("rows", 1, "batch['mask'] is int32[8] in process 0, int32[24] in process 1, and 1 more"),
        ("dtype", 0, "batch['x'] is float16[8, 16] in process 0, float32[8, 16] in process 1. All"),
    ],
)
def test_a_batch_that_changes_in_one_process_ends_all_with_the_reason(
    what: str, where: int, says: str, environment_of: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, "-c", CHANGES, str(Path(__file__).parent), what, str(where)]
    runs = [
        subprocess.Popen(
            command,
            env=environment_of(i),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for run in runs:
        out, err = run.communicate(timeout=LIMIT)
        assert run.returncode == 1, err
        assert "step 5" in out
        assert f"at call 6: {says}" in err


def test_process_rows_of_one_process() -> None:
    assert zerojax.process_rows(33) == slice(0, 33)
