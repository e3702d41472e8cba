"""Part 1: whether everything works on the device, with the numbers that it should have."""

import contextlib
import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import zerojax
from benchmarks.gpu_day import models
from benchmarks.gpu_day.measurement import attempts
from benchmarks.kernel_times import random_like
from benchmarks.kernels import CALLS
from benchmarks.measure import create_state_of, train_step_of
from pallas_kernels import compat
from pallas_kernels.arguments import Measured
from zerojax.checkpoint import Checkpointer
from zerojax.cli.machine import machine
from zerojax.models.kernels import fused_causal_attention

BOUNDS = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 1e-2}
"""Largest relative distances of losses and kernels from their references; float32 is TF32."""
STEPS = 5


def report() -> dict[str, Any]:
    """``zerojax report``."""
    return dataclasses.asdict(machine())


def configs(folder: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name the dtype that computes, and the config."""
    bf16, fp16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}

    def zero(stage: int, **keys: Any) -> dict[str, Any]:
        return {"zero_optimization": {"stage": stage, **keys}}

    both = {"offload_optimizer": host, "offload_param": host}
    return {
        **{f"fp32, stage {s}": ("float32", zero(s)) for s in range(4)},
        **{f"bf16, stage {s}": ("bfloat16", bf16 | zero(s)) for s in (1, 3)},
        "fp16, stage 2": ("float16", fp16 | zero(2)),
        "optimizer on the host": ("bfloat16", bf16 | zero(2, offload_optimizer=host)),
        "optimizer and parameters on the host": ("bfloat16", bf16 | zero(3, **both)),
        "fp16, optimizer on the host": ("float16", fp16 | zero(2, offload_optimizer=host)),
        "optimizer on disk": ("bfloat16", bf16 | zero(3, offload_optimizer=disk)),
    }


def losses(
    size: Mapping[str, Any], rows: int, seq: int, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Distance of each config's losses from plain jit's, over some steps of a small GPT."""
    batch = models.batch_of(size, rows, seq)
    model = models.build(size, layers=models.OWN)
    plain = jax.jit(train_step_of(model))
    state = jax.jit(create_state_of(model))(jax.random.key(0))
    wanted = _losses(plain, state, batch)
    yield {"plain jit": {"losses": wanted}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tries = {
            name: functools.partial(_beside, model, dtype, config, batch, wanted)
            for name, (dtype, config) in configs(folder).items()
            if not only or name in only
        }
        yield from attempts(tries)


def _beside(
    model: Any, dtype: str, config: dict[str, Any], batch: Any, wanted: Sequence[float]
) -> dict[str, Any]:
    zero = _zero(config)
    state = zero.init(create_state_of(model), jax.random.key(0))
    found = _losses(zero(train_step_of(model)), state, batch)
    apart = max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
    if not apart <= BOUNDS[dtype]:
        raise AssertionError(f"losses {found}, plain jit {wanted}: apart {apart:.2e}")
    return {"apart": apart, "losses": found}


def _zero(config: Mapping[str, Any]) -> zerojax.Zero:
    return zerojax.zero({"gradient_clipping": 0.0, **config}, mesh=zerojax.mesh(1))


def _losses(step: Callable[..., Any], state: Any, batch: Any) -> list[float]:
    found = []
    for _ in range(STEPS):
        state, out = step(state, batch)
        found.append(float(out["loss"]))
    return found


def checkpoints(size: Mapping[str, Any], rows: int, seq: int) -> Iterator[dict[str, Any]]:
    """Saved, trained on, restored, trained on: the same loss, bit for bit."""
    batch, model = models.batch_of(size, rows, seq), models.build(size, layers=models.OWN)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = ("bf16, stage 3", "optimizer and parameters on the host", "optimizer on disk")
        known = configs(folder)
        yield from attempts(
            {n: functools.partial(_goes_on, model, known[n][1], batch, folder) for n in names}
        )


def _goes_on(model: Any, config: dict[str, Any], batch: Any, folder: str) -> dict[str, Any]:
    zero, create_state = _zero(config), create_state_of(model)
    step = zero(train_step_of(model))
    state, _ = step(zero.init(create_state, jax.random.key(0)), batch)
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        Checkpointer(place, zero) as checkpointer,
    ):
        checkpointer.save(1, state)
        checkpointer.wait()
        state, out = step(state, batch)
        del state
        restored = checkpointer.restore(zero.abstract_state(create_state, jax.random.key(0)))
    _, again = step(restored, batch)
    if float(out["loss"]) != float(again["loss"]):
        raise AssertionError(f"loss {out['loss']} before, {again['loss']} after restoring")
    return {"loss": float(again["loss"])}


def kernels(largest: int | None = None, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Each call of the kernels beside its reference on the same random numbers.

    Args:
      largest: Every dimension at the most; None for the calls as they are measured.
      only: Names of kernels; all by default.
    """
    calls = [small(each, largest) for each in CALLS if not only or each.kernel in only]
    there = jax.default_backend() == "gpu"
    with contextlib.nullcontext() if there else compat.simulator():
        yield from attempts(
            {f"{c.kernel}, {c.shape}": functools.partial(distances, c) for c in calls}
        )


def small(call: Measured, largest: int | None) -> Measured:
    """A call whose arrays have no dimension above ``largest``."""
    if largest is None:
        return call

    def cut(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(min(n, largest) for n in x.shape), x.dtype)

    return dataclasses.replace(call, arguments=jax.tree.map(cut, call.arguments))


def distances(call: Measured) -> dict[str, Any]:
    """The largest ``|kernel - reference| / |reference|`` of a call's results.

    Raises:
      AssertionError: a result is further away than its dtype allows, or not finite.
    """
    results = {}
    for name in ("xla", "mosaic_gpu"):
        run = jax.jit(call.call(name))
        results[name] = jax.tree.leaves(run(*jax.tree.map(random_like, call.arguments)))
    worst: dict[str, float] = {}
    for wanted, got in zip(*results.values(), strict=True):
        distance, dtype = float(_distance(got, wanted)), wanted.dtype.name
        worst[dtype] = max(worst.get(dtype, 0.0), distance)
        bound = BOUNDS.get(dtype, BOUNDS["bfloat16"])
        if not distance <= bound:
            raise AssertionError(f"{call.kernel}, {call.shape}: {dtype} apart {distance:.2e}")
    return {"apart": worst}


def masks(rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Causal attention of padded rows by each implementation, and its gradients, beside XLA's."""
    on_gpu = jax.default_backend() == "gpu"
    implementations = ("cudnn", "mosaic_gpu") if on_gpu else ("xla",)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (rows, tokens, n, 64), jnp.bfloat16)
        for key, n in zip(keys, (8, 2, 2), strict=True)
    )
    lengths = jnp.linspace(1, tokens, rows).astype(int)[:, None]
    paddings = {
        "right": jnp.arange(tokens) < lengths,
        "left": jnp.arange(tokens) >= tokens - lengths,
    }

    def results(implementation: str, mask: jax.Array) -> list[jax.Array]:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = fused_causal_attention(q, k, v, mask, implementation=implementation)
            y = jnp.where(mask[..., None, None], y, 0)
            return jnp.square(y.astype(jnp.float32)).sum(), y

        grads, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
        return [y, *grads]

    def beside(implementation: str, mask: jax.Array) -> dict[str, Any]:
        found, wanted = (results(each, mask) for each in (implementation, "xla"))
        apart = [float(_distance(a, b)) for a, b in zip(found, wanted, strict=True)]
        if not max(apart) <= BOUNDS["bfloat16"]:
            raise AssertionError(f"{implementation}: result and gradients apart {apart}")
        return {"apart": apart}

    yield from attempts(
        {
            f"{implementation}, padding on the {side}": functools.partial(
                beside, implementation, mask
            )
            for implementation in implementations
            for side, mask in paddings.items()
        }
    )


@jax.jit
def _distance(got: jax.Array, wanted: jax.Array) -> jax.Array:
    a, b = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-30)


def kernel_tests(seconds: float) -> dict[str, Any]:
    """``tests/kernels`` on the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider"]
    done = subprocess.run(
        ["env", "ZEROJAX_TEST_ON=gpu", *command, "tests/kernels"],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise AssertionError(done.stdout[-6000:] + done.stderr[-2000:])
    return {"says": done.stdout.strip().splitlines()[-1]}
