"""`zerojax.fit` in a program, compiled for the CPU devices of the tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.training import train_state

import zerojax
from zerojax.config import ConfigError
from zerojax.devices.rates import RESERVE, Rates, rates
from zerojax.foresight.devices import rates_here
from zerojax.models.registry import ModelError
from zerojax.tuning.space import left_open


class Small(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Dense(32)(nn.Embed(32, 64)(tokens))


def small() -> Small:
    return Small()


def room(of: int) -> Rates:
    return dataclasses.replace(rates("h100"), memory=RESERVE + of)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


AUTO = {
    "zero_optimization": {"stage": "auto", "offload_optimizer": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}


@pytest.mark.slow
def test_auto_becomes_a_config_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    fitted = zerojax.fit(AUTO, small, train_batch_size=16, seq=4, rates=room(10**9))
    assert "zerojax: compiling stage 0" in capsys.readouterr().err
    assert {each.choice.stage for each in fitted.ranking} == {0, 1, 2, 3}
    assert fitted.compiled + fitted.remembered == len(fitted.ranking)
    assert fitted.config["train_batch_size"] == 16
    zero = zerojax.zero(fitted.config)
    assert zero.config.stage == fitted.choice.stage
    assert AUTO["zero_optimization"] == {"stage": "auto", "offload_optimizer": "auto"}
    again = zerojax.fit(AUTO, small, train_batch_size=16, seq=4, rates=room(10**9), compiles=1)
    assert (again.config, again.compiled) == (fitted.config, 0)


def test_a_step_of_ones_own() -> None:
    """With a key behind the batch."""

    def own(zero: zerojax.Zero, rows: int) -> zerojax.Workload:
        def create_state(key: jax.Array) -> object:
            params = {"w": jnp.ones((8, 8))}
            return train_state.TrainState.create(
                apply_fn=lambda: None, params=params, tx=zero.optimizer()
            )

        def step(state, batch, key):  # type: ignore[no-untyped-def]
            def loss(params):  # type: ignore[no-untyped-def]
                noise = jax.random.normal(key, batch["x"].shape)
                return ((batch["x"] + noise) @ params["w"]).mean()

            value, grads = zerojax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), {"loss": value}

        batch = {"x": jax.ShapeDtypeStruct((rows, 8), jnp.float32)}
        key = jax.eval_shape(lambda: jax.random.key(0))
        return zerojax.Workload(create_state, step, batch, rows, (key,))

    config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    fitted = zerojax.fit(config, own, train_batch_size=8, rates=room(10**9))
    assert fitted.choice.stage == 2


def test_a_step_that_fails_is_not_one_that_does_not_fit() -> None:
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Dense(3)(tokens.astype(float) @ jnp.ones((5, 5)))

    with pytest.raises(ModelError, match="dot_general"):
        zerojax.fit({}, Broken, train_batch_size=8, seq=4, rates=room(10**9))


def test_nothing_fits() -> None:
    with pytest.raises(zerojax.OutOfMemoryError, match="nothing fits 8 x h100"):
        zerojax.fit({}, small, train_batch_size=8, seq=4, rates=room(10))


def test_cpus_are_in_no_list() -> None:
    with pytest.raises(
        ValueError, match=r"'cpu' devices have no known speed: use zerojax\.topology"
    ):
        zerojax.fit(AUTO, small, train_batch_size=8)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("kind", ["h100", "a100-40gb"])
def test_devices_that_are_not_there_have_the_figures_of_their_kind(kind: str) -> None:
    assert rates_here(zerojax.topology(kind, 2)) == rates(kind)


def test_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"gradient_clipping": 1, "gradient_clipping": 2}')
    with pytest.raises(ConfigError, match="is set twice"):
        zerojax.fit(path, small, rates=room(10**9))
    with pytest.raises(ValueError, match="network '50GB': write 400gb"):
        zerojax.fit(AUTO, small, rates=room(10**9), network="50GB")
    path.write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="object"):
        zerojax.fit(path, small, rates=room(10**9))
    with pytest.raises(ConfigError, match='"stage" is not "auto" in the config'):
        zerojax.fit({}, small, rates=room(10**9), auto={"stage": 3})
    with pytest.raises(ConfigError, match="write 8 or 16"):
        zerojax.fit({}, small, rates=room(10**9), train_batch_size=12)
    with pytest.raises(ValueError, match="unknown model 'gtp2'"):
        zerojax.fit({}, "gtp2", rates=room(10**9))


def test_deepspeeds_section_bounds_the_search() -> None:
    """The shortest step, of the two micro-batches that lie within."""
    section = {
        "enabled": True,
        "metric": "latency",
        "min_train_micro_batch_size_per_gpu": 2,
        "max_train_batch_size": 64,
        "num_tuning_micro_batch_sizes": 2,
    }
    config = {
        "zero_optimization": {"stage": 1, "offload_optimizer": None},
        "dump_state": True,
    }
    fitted = zerojax.fit({**config, "autotuning": section}, small, seq=4, rates=room(10**9))
    assert {each.choice.micro for each in fitted.ranking} == {2, 8}
    seconds = [each.seconds for each in fitted.ranking]
    assert seconds == sorted(seconds)
    assert fitted.choice.micro == 2  # by tokens a second it would be 8
    assert "autotuning" not in fitted.config
    assert zerojax.zero(fitted.config).config.dump_state


def test_bounds_that_hold_nothing() -> None:
    section = {"enabled": True, "max_train_micro_batch_size_per_gpu": 4}
    config = {"autotuning": section, "train_micro_batch_size_per_gpu": 8}
    with pytest.raises(ConfigError, match="autotuning: no micro-batch of 8 rows is within"):
        zerojax.fit(config, small, seq=4, rates=room(10**9))
    with pytest.raises(ConfigError, match=r"autotuning\.metrik: unknown key"):
        zerojax.fit({"autotuning": {"metrik": "latency"}}, small, rates=room(10**9))
    off = {"autotuning": {**section, "enabled": False}, "train_micro_batch_size_per_gpu": 8}
    space, rest = left_open(off, None, 8, [None])
    assert (space.batches.sizes(), rest["autotuning"]["enabled"]) == ([8], False)
