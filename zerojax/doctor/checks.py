"""Checks of zerojax's features on the available devices, with a minimal model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from pallas_kernels import dispatch
from zerojax.api import zero
from zerojax.devices.rows import process_rows
from zerojax.distributed.exchange import exchange
from zerojax.offload.disk.array import DiskArray


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
      name: The name of the feature.
      works: Whether the feature works.
      says: A description of the check; for a failure, the reason and the remedy.
      seconds: The duration of the check.
    """

    name: str
    works: bool
    says: str
    seconds: float


_COMPILE = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from zerojax.devices.topology import topology

replicated = NamedSharding(topology(sys.argv[1], int(sys.argv[2])), PartitionSpec())
x = jax.ShapeDtypeStruct((128,), "float32", sharding=replicated)
jax.jit(lambda x: x * 2).lower(x).compile()
"""


class Try(NamedTuple):
    """A check to run: its name, and a function that describes what it did, or raises."""

    name: str
    check: Callable[[], str]


def stages() -> str:
    """Runs one step at each stage."""
    for stage in range(4):
        _step(stage=stage)
    n = len(jax.devices())
    if n == 1:
        return "one step at each; there is one device, so each takes the same memory"
    return f"one step at each, over {n} devices"


def to_host() -> str:
    """Runs one step with the entire state in host memory."""
    _step(stage=3, offload_optimizer="cpu", offload_param="cpu")
    return "one step with the state in pinned_host"


def to_disk() -> str:
    """Runs one step with the entire state in files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        folder = exchange("the folder of the report", folder)[0]  # all processes need one config
        os.makedirs(folder, exist_ok=True)
        files = {"device": "nvme", "nvme_path": folder}
        state = _step(stage=3, offload_optimizer=files, offload_param=files)
        store = next(x.leaf.store for x in jax.tree.leaves(state) if isinstance(x, DiskArray))
        store.wait()
        store.close()
    return f"one step with the state in files under {tempfile.gettempdir()}"


def kernels() -> str:
    """Checks that the default device can run the fused kernels, without running them."""
    target = dispatch.target()
    if "mosaic_gpu" not in dispatch.available(target):
        raise RuntimeError(
            f"they need an H100, H200 or B200, and this is {target.kind}. XLA computes the same "
            "in their place; pallas_kernels.compat.simulator() runs them here to test them"
        )
    return f"on {target.kind}"


def absent_gpus() -> str:
    """Compiles for one GPU that need not exist."""
    return _compiled("h100", 1)


def absent_tpus() -> str:
    """Compiles for the four TPUs of a host that need not exist."""
    return _compiled("v5e", 4)


def processes() -> str:
    """Checks that this process is one of several."""
    if jax.process_count() == 1:
        raise RuntimeError(
            "this is the only process. Where there are more, call zerojax.init_distributed() "
            "in each before JAX is first used"
        )
    return f"{jax.process_count()} of them, this is number {jax.process_index()}"


CHECKS = (
    Try("stages 0 to 3", stages),
    Try("offload to host memory", to_host),
    Try("offload to disk (nvme)", to_disk),
    Try("fused kernels", kernels),
    Try("compile for absent GPUs", absent_gpus),
    Try("compile for absent TPUs", absent_tpus),
    Try("several processes", processes),
)


def tried(checks: Iterable[Try] = CHECKS) -> tuple[Check, ...]:
    """Runs the checks and returns their outcomes; a check that raises counts as not working.

    Example:
      >>> def refuses() -> str:
      ...     raise ValueError("no disk: add one")
      >>> (check,) = tried([("disk", refuses)])
      >>> check.works, check.says
      (False, 'no disk: add one')
    """
    outcomes = []
    for name, check in checks:
        start = time.perf_counter()
        try:
            works, says = True, check()
        except Exception as error:
            works, says = False, in_one_line(error)
        outcomes.append(Check(name, works, says, round(time.perf_counter() - start, 2)))
    return tuple(outcomes)


def in_one_line(error: Exception) -> str:
    """Returns an error as one line, with its type if the text by itself is too vague."""
    text = " ".join(str(error).split())
    is_plain = isinstance(error, ValueError | ImportError | RuntimeError)
    return text if is_plain and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _step(**config: Any) -> TrainState:
    """Runs a decorated step of a linear model, with one row per device, and returns the state."""
    n = len(jax.devices())
    decorator = zero(stage3_param_persistence_threshold=0, **config)

    @decorator
    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((batch @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        params = {"w": jnp.ones((n, 2))}
        return TrainState.create(apply_fn=jnp.dot, params=params, tx=optax.adam(0.1))

    state, _ = jax.block_until_ready(
        step(decorator.init(create), jnp.ones((n, n))[process_rows(n)])
    )
    return state


def _compiled(kind: str, devices: int) -> str:
    """Compiles ``x * 2`` for absent devices, in a process that uses no accelerator."""
    process = subprocess.run(
        [sys.executable, "-c", _COMPILE, kind, str(devices)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if process.returncode:
        error_lines = process.stderr.strip().splitlines()[-1:] or ["the process ended"]
        raise RuntimeError(error_lines[0].partition("Error: ")[2] or error_lines[0])
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    caveat = "" if platforms == "cpu" else "; a program of yours sets JAX_PLATFORMS=cpu for it"
    return f'x * 2 for zerojax.topology("{kind}", {devices}){caveat}'
