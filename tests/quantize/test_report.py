"""The report of what quantization costs and saves."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax


@pytest.fixture
def params() -> dict[str, jax.Array]:
    return {"kernel": jax.random.normal(jax.random.key(0), (128, 128)), "bias": jnp.zeros(128)}


@jax.jit
def loss(params: Any, x: jax.Array) -> jax.Array:
    params = zerojax.dequantize(params)
    return jnp.mean((x @ params["kernel"] + params["bias"]) ** 2)


BATCHES = [jnp.ones((4, 128)), jnp.full((4, 128), 2.0)]


def test_metric_and_bytes(params: Any) -> None:
    quantized = zerojax.quantize_weights(params, 4)
    report = zerojax.quantization_report(loss, params, quantized, BATCHES)
    assert report.before == pytest.approx(sum(float(loss(params, x)) for x in BATCHES) / 2)
    assert report.after == pytest.approx(sum(float(loss(quantized, x)) for x in BATCHES) / 2)
    assert report.relative_loss == pytest.approx(report.after / report.before - 1)
    assert report.bytes_before == 4 * (128 * 128 + 128)
    assert report.bytes_after == 128 * 128 // 2 + 4 * 128 + 4 * 128
    assert (report.quantized, report.kept) == (1, 1)
    lines = str(report).splitlines()
    assert lines[0].split() == ["original", "quantized", "change"]
    assert lines[1].endswith(f"{report.relative_loss:+.2%} worse")
    assert "0.14 times" in lines[2]


def test_a_loss_above_the_limit(params: Any) -> None:
    def worse(params: Any, x: jax.Array) -> jax.Array:
        return jnp.float32(2.1 if "QArray" in str(type(params["kernel"])) else 2.0)

    quantized = zerojax.quantize_weights(params)
    zerojax.quantization_report(worse, params, quantized, BATCHES, max_loss=0.06)
    with pytest.raises(ValueError, match=r"loses 5.00% .* max_loss=2.00%: write bits=8"):
        zerojax.quantization_report(worse, params, quantized, BATCHES, max_loss=0.02)
    nothing = {"kernel": params["kernel"] * jnp.nan, "bias": params["bias"]}
    with pytest.raises(ValueError, match="loses nan%"):
        zerojax.quantization_report(
            loss, params, zerojax.quantize_weights(nothing), BATCHES, max_loss=0.5
        )


def test_bad_arguments(params: Any) -> None:
    quantized = zerojax.quantize_weights(params)
    with pytest.raises(ValueError, match="batches is empty: pass at least one"):
        zerojax.quantization_report(loss, params, quantized, [])
    with pytest.raises(ValueError, match="no array of the quantized weights is quantized"):
        zerojax.quantization_report(loss, params, params, BATCHES)
    with pytest.raises(ValueError, match=r"metric has shape \(4, 128\): return a scalar"):
        zerojax.quantization_report(lambda params, x: x, params, quantized, BATCHES)
