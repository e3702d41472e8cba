"""Trains with and without offload, and says by one JSON line a case how the two runs compare.

A process of its own, for its XLA flags: without them XLA on CPU rounds differently in programs that
are cut differently (fused multiply-add, divisions by a constant, 16-bit values kept in 32).
"""

import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = "--xla_cpu_max_isa=AVX --xla_disable_hlo_passes=algsimp --xla_allow_excess_precision=false"
STEPS = 30
ROWS = 16
CPU = {"offload_optimizer": "cpu"}
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}
PARAM = {"offload_param": "cpu"}
NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 2}}
BOTH_NVME = NVME | {"offload_param": {"device": "nvme", "buffer_count": 2, "max_in_cpu": 300}}
FP16 = {
    "fp16": True, "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 4,
    "gradient_clipping": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A config with something offloaded, beside the same without.

    Attributes:
      model: in ``MODELS``; ``tx``: see :func:`optimizer`.
      base: keywords of both; ``offload`` those of one of them.
      exact: bit for bit, or close.
      sweep: shows what other cases show, elsewhere.
    """

    name: str
    offload: dict[str, Any]
    stage: int = 3
    model: str = "mlp"
    tx: str = "adamw"
    base: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    replicas: int | None = None
    group: int = 240
    exact: bool = True
    sweep: bool = False

    @property
    def skips(self) -> bool:
        return "fp16" in self.base

    @property
    def places(self) -> set[str]:
        """Where its state lies at rest, besides the device."""
        section = self.offload.get("offload_optimizer") or self.offload["offload_param"]
        return {"host" if section == "cpu" or section["device"] == "cpu" else "disk"}


CLIP = {"gradient_clipping": 0.1}
TWICE = {"gradient_accumulation_steps": 2}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
ON_HOST = {"offload_optimizer": {"device": "cpu", "compute_on": "host"}}

CASES = [
    Case("cpu, stage 3", CPU, 3, base=CLIP, sweep=True),
    Case("cpu, stage 1, fp16", CPU, 1, base=FP16, sweep=True),
    Case("cpu, stage 2, fp16", CPU, 2, base=FP16),
    Case("cpu, stage 2, bf16", CPU, 2, base={"bf16": True}, devices=8, group=120, sweep=True),
    Case("cpu, one group", CPU, 2, base=CLIP, devices=1, group=10**9, sweep=True),
    Case("cpu, accumulation", CPU, 1, base=CLIP | TWICE),
    Case("cpu, ratio", HALF, 2, base=CLIP),
    Case("cpu, lamb", CPU, 2, tx="lamb", sweep=True),
    Case("cpu, adafactor", CPU, 2, tx="adafactor", sweep=True),
    Case("cpu, mask", CPU, 2, tx="mask", sweep=True),
    Case("cpu, clip in the chain", CPU, 3, tx="chain", sweep=True),
    Case("cpu, batch_stats and dropout", CPU, 2, "stateful", sweep=True),
    Case("cpu, on the host", ON_HOST, 2, base=CLIP, exact=False),
    Case("nvme, stage 3", NVME, 3, base=CLIP, devices=8, group=120, sweep=True),
    Case("nvme, stage 1, fp16", NVME, 1, base=FP16 | TWICE, sweep=True),
    Case("nvme, nnx", NVME, 3, "nnx", sweep=True),
    Case(
        "both, scanned, replicas", BOTH, 3, "scanned", base=CLIP, devices=8, replicas=2, group=120,
    ),
    Case("both nvme, replicas", BOTH_NVME, 3, base=FP16, devices=8, replicas=4, sweep=True),
    Case("both, unrolled, fp16", BOTH, 3, "unrolled", base=FP16 | TWICE, sweep=True),
    Case("both, ratio", BOTH | HALF, 3, base=CLIP, sweep=True),
    Case("param", PARAM, 3, "scanned", base=CLIP),
    Case("param, fp16", PARAM, 3, base=FP16, sweep=True),
    Case("both nvme", BOTH_NVME, 3, "scanned", base=CLIP),
    Case("param on the host, state nvme", BOTH | NVME, 3, "unrolled", base=CLIP, sweep=True),
]  # fmt: skip


def main(out: str, *names: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    with tempfile.TemporaryDirectory() as folder, open(out, "a", buffering=1) as lines:
        # Most programs of one case are programs of another.
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        disk = Path(folder) / "nvme"
        disk.mkdir()
        for case in CASES:
            if names and case.name not in names:
                continue
            begin = time.perf_counter()
            try:
                told = compared(case, disk)
            except Exception:
                told = {"error": traceback.format_exc()}
            told |= {"case": case.name, "seconds": round(time.perf_counter() - begin, 2)}
            lines.write(json.dumps(told) + "\n")


def compared(case: Case, disk: Path) -> dict[str, Any]:
    """Trains as the case says."""
    import numpy as np

    base = {"stage": case.stage, "stage3_param_persistence_threshold": 20, **case.base}
    want = plain(case.model, case.tx, case.devices, case.replicas, json.dumps(base))
    offload = {
        section: given | {"nvme_path": str(disk)} if "buffer_count" in given else given
        for section, given in case.offload.items()
    }
    got = train(case, base | offload | {"sub_group_size": case.group})
    differs = {
        name: float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0))
        for (name, a), (other, b) in zip(got["arrays"], want["arrays"], strict=True)
        if name != other or a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=True)
    }
    return {
        "differs": differs,
        "losses": got["losses"] == want["losses"],
        "far": max(
            float(np.max(np.abs(a.astype(float) - b), initial=0))
            for (_, a), (_, b) in zip(got["arrays"], want["arrays"], strict=True)
            if np.isfinite(b).all()
        ),
        "fell": want["losses"][-1] < 0.9 * want["losses"][0],
        "skipped": got["skipped"],
        "moved": got["moved"],
        "places": got["places"],
    }


@functools.cache
def plain(name: str, tx: str, devices: int, replicas: int | None, base: str) -> dict[str, Any]:
    """The run without offload."""
    return train(Case("", {}, 0, name, tx, devices=devices, replicas=replicas), json.loads(base))


def train(case: Case, keywords: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    import zerojax

    create, function = model(case.model, case.tx)
    zero = zerojax.zero(mesh=zerojax.mesh(case.devices, replicas=case.replicas), **keywords)
    state = zero.init(create)
    step, pair = zero(function), isinstance(state, tuple)
    arrays: Any = [*leaves(state)]
    kinds = sorted({leaf.place for leaf in zero.plan(state).all_leaves()})
    losses, skipped, moved = [], 0, 0
    for batch in batches():
        if pair:
            loss = step(*state, batch)
        else:
            state, loss = step(state, batch)
        losses.append(float(loss))
        now = [*leaves(state)]
        overflows = int(zerojax.telemetry(state[1] if pair else state)["skipped_steps"])
        if overflows > skipped:
            pairs = zip(arrays, now, strict=True)
            moved += sum(a is not b for (name, a), (_, b) in pairs if "rest" not in name)
        arrays, skipped = now, overflows
    return {
        "losses": losses,
        "skipped": skipped,
        "moved": moved,
        "places": kinds,
        "arrays": [(name, np.asarray(x)) for name, x in scalars_too(state)],
    }


def scalars_too(state: Any) -> Iterator[tuple[str, Any]]:
    """All arrays of a state by name."""
    import jax
    import jax.numpy as jnp

    from zerojax.placement.states import split_state

    parts = split_state(state if isinstance(state, tuple) else (state,)).parts
    for path, x in jax.tree_util.tree_leaves_with_path(parts):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        yield jax.tree_util.keystr(path), jax.random.key_data(x) if is_key else x


def leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and the optimizer's arrays: what is heavy of a state."""
    for name, x in scalars_too(state):
        if x.ndim and not name.startswith(".rest"):
            yield name, x


def batches() -> Iterator[dict[str, Any]]:
    import numpy as np

    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.normal(size=(ROWS, 16)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x[:, :8])}


def loss_of(y: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2)


def plain_step(apply: Callable[[Any, Any], Any]) -> Any:
    def step(state: Any, batch: Any) -> Any:
        import zerojax

        def loss(params: Any) -> Any:
            return loss_of(apply(params, batch["x"]), batch)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return step


def mlp(tx: Any) -> Any:
    """Three layers; one bias is of 7 elements, which no number of devices divides."""
    import jax.numpy as jnp
    import numpy as np
    from flax.training.train_state import TrainState

    rng = np.random.default_rng(1)
    params = {
        "first": rng.normal(size=(16, 40)).astype(np.float32) / 4,
        "bias": np.zeros(40, np.float32),
        "second": rng.normal(size=(40, 7)).astype(np.float32) / 6,
        "odd": np.zeros(7, np.float32),
        "third": rng.normal(size=(7, 8)).astype(np.float32) / 3,
        "scale": np.ones((), np.float32),
    }

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def apply(p: Any, x: Any) -> Any:
        x = jnp.tanh(x @ p["first"] + p["bias"])
        return (jnp.tanh(x @ p["second"] + p["odd"]) @ p["third"]) * p["scale"]

    return create, plain_step(apply)


def blocks(tx: Any, *, scanned: bool) -> Any:
    """Two residual blocks, rematerialised."""
    import jax
    from flax import linen as nn
    from flax.training.train_state import TrainState
    from jax import numpy as jnp

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm(dtype=x.dtype)(x)
            y = nn.tanh(nn.Dense(32, dtype=x.dtype)(y))
            return x + nn.Dense(24, dtype=x.dtype)(y), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(24, dtype=x.dtype)(x)
            remat = nn.remat(Block, prevent_cse=not scanned)
            if scanned:
                layers = nn.scan(
                    remat, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
                )
                x, _ = layers(name="layers")(x, None)
            else:
                for i in range(2):
                    x, _ = remat(name=f"layer_{i}")(x, None)
            return nn.Dense(8, dtype=x.dtype)(x)

    network = Model()
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 16)))["params"]

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    return create, plain_step(lambda params, x: network.apply({"params": params}, x))


def stateful(tx: Any) -> Any:
    """Batch statistics and a key that the state carries."""
    import jax
    from flax import linen as nn
    from flax.training.train_state import TrainState
    from jax import numpy as jnp

    import zerojax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(32, dtype=x.dtype)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=x.dtype)(x)
            x = nn.Dropout(0.1, deterministic=False)(nn.tanh(x))
            return nn.Dense(8, dtype=x.dtype)(x)

    class State(TrainState):
        batch_stats: Any
        key: Any

    network, key = Model(), jax.random.key(0)
    made = jax.jit(network.init)({"params": key, "dropout": key}, jnp.zeros((2, 16)))

    def create() -> State:
        return State.create(
            apply_fn=None, params=made["params"], tx=tx, batch_stats=made["batch_stats"], key=key
        )

    def step(state: State, batch: Any) -> Any:
        key, dropout = jax.random.split(state.key)

        def loss(params: Any) -> Any:
            y, new = network.apply(
                {"params": params, "batch_stats": state.batch_stats}, batch["x"],
                mutable=["batch_stats"], rngs={"dropout": dropout},
            )  # fmt: skip
            return loss_of(y, batch), new["batch_stats"]

        (value, stats), grads = zerojax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=stats, key=key), value

    return create, step


def in_nnx(tx: Any) -> Any:
    """A model and an optimizer that are updated in place."""
    import jax
    from flax import nnx
    from jax import numpy as jnp
    from programs.basic_nnx import MLP

    import zerojax

    form, values = nnx.split(nnx.jit(lambda: MLP(nnx.Rngs(0), norm=True))())

    def create() -> Any:
        network = nnx.merge(form, jax.tree.map(jnp.copy, values))
        return network, nnx.Optimizer(network, tx, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = zerojax.value_and_grad(lambda m: loss_of(m(batch["x"]), batch))(model)
        optimizer.update(model, grads)
        return value

    return create, step


MODELS: dict[str, Callable[[Any], Any]] = {
    "mlp": mlp,
    "scanned": functools.partial(blocks, scanned=True),
    "unrolled": functools.partial(blocks, scanned=False),
    "stateful": stateful,
    "nnx": in_nnx,
}


def optimizer(name: str) -> Any:
    import jax
    import optax

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    if name == "adamw":
        return optax.adamw(optax.linear_schedule(2e-2, 5e-3, 30), weight_decay=0.01)
    if name == "mask":
        return optax.adamw(1e-2, weight_decay=0.1, mask=matrices)
    if name == "chain":
        return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(2e-2))
    if name == "adafactor":
        return optax.adafactor(2e-2, min_dim_size_to_factor=8)
    return optax.lamb(2e-2)


@functools.cache
def model(name: str, tx: str) -> Any:
    """A function that makes a state, and a step of it."""
    return MODELS[name](optimizer(tx))


if __name__ == "__main__":
    main(*sys.argv[1:])
