"""The update by the fused kernel, in a decorated step: in the simulator, and compiled for H100s."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from pallas_kernels import compat, dispatch
from zerojax.config import ConfigError
from zerojax.optim.named import named_optimizer

pytestmark = pytest.mark.usefixtures("quick_compile")

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16}}
OVERFLOWS = 2  # the step with an overflow


class Average(TrainState):
    average: Any = None


def setting(implementation: str | None, devices: Any, stage: int, **more: Any) -> Any:
    """The decorator, and the state's maker, of a small network."""
    kind = {"type": "AdamW", "params": ADAMW | {"implementation": implementation}}
    zero = zerojax.zero(
        {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": kind,
            "gradient_clipping": 0.5,
            **more,
        },
        mesh=devices if isinstance(devices, jax.sharding.Mesh) else _mesh(devices),
    )

    def create(key: jax.Array, width: int = 16) -> Average:
        w, v = jax.random.normal(key, (2, width, 2 * width)) * 0.3
        params = {"w": w, "b": jnp.zeros((2 * width,)), "v": v.T}
        return Average.create(
            apply_fn=None,
            params=params,
            tx=zero.optimizer(),
            average=jax.tree.map(jnp.copy, params),
        )

    return zero, create


def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))


def stepping(state: Average, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        x = batch["x"].astype(p["w"].dtype)
        y = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]
        return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2) * batch["weight"]

    value, grads = zerojax.value_and_grad(loss)(state.params)
    state = state.apply_gradients(grads=grads)
    # What follows from the new parameters, and a change of them after the update.
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
    clipped = state.params | {"b": jnp.clip(state.params["b"], -0.01, 0.01)}
    return state.replace(average=average, params=clipped), value


def train(implementation: str | None, devices: int, stage: int, **more: Any) -> Any:
    """Losses and state after a few steps, one of them with an overflow in fp16."""
    zero, create = setting(implementation, devices, stage, train_batch_size=16, **more)
    step = zero(stepping)
    state = zero.init(create, jax.random.key(0))
    rng = np.random.default_rng(0)
    losses = []
    for i in range(4):
        batch = {name: rng.normal(size=(16, 16)).astype(np.float32) for name in ("x", "y")}
        weight = 1e30 if i == OVERFLOWS and "fp16" in more else 1.0
        state, loss = step(state, batch | {"weight": np.float32(weight)})
        losses.append(float(loss))
    opt_state = state.tx.numbers.with_inner(state.opt_state)
    return losses, jax.device_get((state.params, state.average, opt_state))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("devices", "stage", "more"),
    [
        (1, 0, {}),
        (2, 3, {}),
        (2, 2, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}),
        (2, 3, FP16),
    ],
    ids=["one device", "stage 3", "bf16, accumulation", "fp16"],
)
def test_the_step_computes_the_same(devices: int, stage: int, more: dict[str, Any]) -> None:
    losses, want = train("xla", devices, stage, **more)
    with compat.simulator():
        got_losses, got = train("mosaic_gpu", devices, stage, **more)
    assert np.all(np.isfinite(losses[:OVERFLOWS]))
    np.testing.assert_allclose(got_losses, losses, rtol=5e-3 if more else 1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-2 if more else 1e-3, atol=2e-3, err_msg=name)
    assert want[2].skipped == ("fp16" in more)
    # What the step did to a parameter after the update counts.
    assert np.max(np.abs(got[0]["b"])) <= np.float32(0.01) + 1e-4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decoupled", [True, False])
def test_it_is_the_named_optimizer(decoupled: bool) -> None:
    """With a schedule, a mask of the decay, a moving beta, and scale and skip."""
    kind = zerojax.config.OptimizerConfig(
        type="Adam",
        params={"weight_decay": 0.1, "weight_decay_mask": "no_bias_and_norm", "eps": 1e-6}
        | {"adam_w_mode": decoupled, "betas": [0.8, 0.9], "implementation": "mosaic_gpu"},
    )
    tx, _ = named_optimizer(kind, lambda count: 0.1 / (1.0 + count))
    rng = np.random.default_rng(1)
    params = {"kernel": rng.normal(size=(8, 32)), "bias": rng.normal(size=(256,))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    sharding = jax.sharding.NamedSharding(_mesh(2), jax.sharding.PartitionSpec("data"))
    shardings = jax.tree.map(lambda _: sharding, params)
    way = tx.one_pass
    one = other = params
    state = other_state = tx.init(params)
    with compat.simulator():
        update = jax.jit(functools.partial(way.update, shardings=shardings))
        for i in range(4):
            grads = jax.tree.map(lambda p, k=i + 1: jnp.sin(p * k), params)
            run = i != 2
            halved = jax.tree.map(lambda g: g * 2, grads)
            one, state = update(halved, state, one, scale=0.5, run=run)
            if run:
                updates, other_state = tx.update(grads, other_state, other)
                other = optax.apply_updates(other, updates)
        jax.block_until_ready(one)
    for a, b in zip(
        jax.tree.leaves((one, state)), jax.tree.leaves((other, other_state)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_who_takes_the_kernel() -> None:
    def wins(kind: str, implementation: str | None = None) -> bool:
        config = zerojax.config.OptimizerConfig(
            type=kind, params={"implementation": implementation}
        )
        return named_optimizer(config)[0].one_pass.wins(zerojax.mesh())

    assert not wins("AdamW")
    assert not wins("FusedAdam")
    with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
        wins("AdamW", "mosaic_gpu")
    with compat.simulator():
        assert wins("AdamW", "mosaic_gpu")
        assert not wins("AdamW")
        # Where it cannot write over the state, it would take 12 bytes a parameter more.
        assert wins("FusedAdam") == compat.IN_PLACE
        assert not wins("FusedAdam", "xla")
    assert dispatch.in_place(dispatch.Target("gpu", "NVIDIA A100-SXM4-80GB")) == "xla"


def test_not_under_offload() -> None:
    with pytest.raises(ConfigError, match=r'implementation: "mosaic_gpu" updates what is on the'):
        zerojax.zero(
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "optimizer": {"type": "FusedAdam", "params": {"implementation": "mosaic_gpu"}},
            }
        )


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(("devices", "stage"), [(1, 0), (8, 3)])
def test_compiled_for_h100(devices: int, stage: int) -> None:
    """One launch for all leaves; where it writes in place, no more memory than without."""
    found = {}
    for implementation in ("xla", "mosaic_gpu"):
        zero, create = setting(
            implementation, zerojax.topology("h100", devices=devices), stage, bf16={"enabled": True}
        )
        state = zero.abstract_state(functools.partial(create, width=512), jax.random.key(0))
        batch = {name: jax.ShapeDtypeStruct((16, 512), jnp.float32) for name in ("x", "y")}
        batch["weight"] = jax.ShapeDtypeStruct((), jnp.float32)
        found[implementation] = zero(stepping).lower(state, batch).compile()
    texts = {name: compiled.as_text() for name, compiled in found.items()}
    launches = {name: text.count('custom_call_target="mosaic_gpu') for name, text in texts.items()}
    assert launches == {"xla": 0, "mosaic_gpu": 1}
    if compat.IN_PLACE:
        peak = {n: c.memory_analysis().peak_memory_in_bytes for n, c in found.items()}
        assert peak["mosaic_gpu"] <= 1.01 * peak["xla"]
        assert not re.findall(r"= f32\[\d+,512\]\S* copy\(", texts["mosaic_gpu"])
