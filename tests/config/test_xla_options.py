"""The section of XLA's options, which XLA itself knows on both versions of jax."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.settings import XLA
from zerojax.xla.compiler import options

VALUES: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 29,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 29,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 29,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_experimental_parallel_scale_up_collective_overlap_limit": 4,
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_all_gather_mode": "COLLECTIVES_SYMMETRIC_MEMORY",
}
SINCE = {"xla_gpu_experimental_parallel_scale_up_collective_overlap_limit": (0, 12)}
KNOWN = {n: v for n, v in VALUES.items() if jax.version.__version_info__ >= SINCE.get(n, (0,))}


@pytest.mark.parametrize("name", VALUES)
def test_options_that_xla_lacks_are_refused(name: str) -> None:
    gpus: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")] * 8))
    chosen = {name: VALUES[name]}
    if name in KNOWN:
        assert (options(gpus, chosen) or {}).items() >= chosen.items()
    else:
        with pytest.raises(ConfigError, match=rf"^xla\.{name}: the XLA of jax .* remove it"):
            options(gpus, chosen)
    if name in ("xla_gpu_enable_while_loop_unrolling", "xla_gpu_all_gather_mode"):
        with pytest.raises(ConfigError, match=f"^xla\\.{name}: .* with the value 'no such word'"):
            options(gpus, {name: "no such word"})


def test_what_xla_would_not_take() -> None:
    assert XLA.keys() == VALUES.keys()
    with pytest.raises(ConfigError, match=r"did you mean `xla\.xla_gpu_enable_latency_hid"):
        load({"xla": {"xla_gpu_enable_latency_hiding": True}})


def test_the_configs_options_go_before_ours() -> None:
    config = load({"xla": KNOWN})
    assert config.xla == KNOWN
    assert ZeroConfig().xla == {}
    assert options(zerojax.mesh(), KNOWN) == options(zerojax.mesh())  # which has none for GPUs
    gpus: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")] * 8))
    ours = options(gpus, layer=1 << 28)
    assert ours is not None
    assert options(gpus, {}, layer=1 << 28) == ours
    off = {"xla_gpu_enable_latency_hiding_scheduler": False}
    assert options(gpus, off, layer=1 << 28) == ours | off != ours


def test_the_plan_says_where_they_have_no_effect() -> None:
    zero = zerojax.zero(stage=3, xla_gpu_enable_latency_hiding_scheduler=True)
    state = zero.abstract_state(_create)
    assert "options for GPUs, without effect on devices of 'cpu'" in str(zero.plan(state))
    assert "options for GPUs" not in str(zerojax.zero(stage=3).plan(state))


def _create() -> Any:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_several_collectives_at_a_time(kind: str) -> None:
    mesh = zerojax.topology(kind, 8)
    for overlap in (True, False):
        found = options(mesh, overlap=overlap) or {}
        assert ("xla_gpu_experimental_parallel_collective_overlap_limit" in found) == overlap
