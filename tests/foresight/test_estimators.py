"""DeepSpeed's estimators: its published figures, and models of every kind."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import app
from zerojax.foresight.estimators import parameters
from zerojax.models import llama
from zerojax.models.names import llama_13b

# bigscience/T0_3B on one GPU, as the documentation of transformers shows it.
T0_3B, T0_LARGEST = 2_783_959_040, 65_798_144
PUBLISHED = """\
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0"""


def test_the_published_table(capsys: pytest.CaptureFixture[str]) -> None:
    zerojax.estimate_zero3_model_states_mem_needs_all_cold(T0_3B, T0_LARGEST)
    out = capsys.readouterr().out
    assert "1 node, 1 GPU per node" in out
    assert "2783M total params, 65M largest layer params" in out
    assert out.rstrip("\n").endswith(PUBLISHED)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.two = nnx.Linear(4, 100, rngs=rngs), nnx.Linear(100, 3, rngs=rngs)


def test_models() -> None:
    linear = linen.Sequential([linen.Dense(100), linen.Dense(3)])
    shape = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    assert parameters(linear, [shape]) == (803, 500)
    assert parameters(Net(nnx.Rngs(0))) == (803, 500)
    abstract = jax.eval_shape(linear.init, jax.random.key(0), shape)["params"]
    assert zerojax.estimate_zero3_model_states_mem_needs_all_live(abstract).largest_layer == 500
    assert zerojax.estimate_zero2_model_states_mem_needs_all_live(linear, shape).params == 803


def test_a_stack_of_layers_is_not_one_layer() -> None:
    """Called as the guides of DeepSpeed print it, without inputs: Llama 13B has 0.61 GB."""
    found = zerojax.estimate_zero3_model_states_mem_needs_all_live(
        llama_13b(scan=True), num_gpus_per_node=8, num_nodes=1
    )
    assert found.params == 13_015_864_320
    assert found.largest_layer == 32000 * 5120
    assert "0.61GB" in str(found)
    config = llama.LlamaConfig(**llama.SIZES["llama-tiny"])
    for model in (llama.Llama, lambda config: Wrapped(llama.Llama(config))):
        scanned, unrolled = (
            parameters(model(dataclasses.replace(config, scan=scan, remat=scan)))
            for scan in (True, False)
        )
        assert scanned == unrolled


class Wrapped(linen.Module):
    model: linen.Module

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        return self.model(input_ids)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"Dense takes inputs: .* jax.ShapeDtypeStruct"):
        zerojax.estimate_zero3_model_states_mem_needs_all_live(linen.Dense(3))
    with pytest.raises(TypeError, match="Sequential takes args"):
        parameters(linen.Sequential([linen.Dense(3)]))
    with pytest.raises(TypeError, match="a flax module or a tree of parameters, got a str"):
        zerojax.estimate_zero2_model_states_mem_needs_all_live("gpt2")
    with pytest.raises(TypeError, match="a dict has no parameters"):
        zerojax.estimate_zero3_model_states_mem_needs_all_live({})
    with pytest.raises(ValueError, match="total_params = 0 must be above 0 and finite"):
        zerojax.estimate_zero2_model_states_mem_needs_all_cold(0)
    with pytest.raises(ValueError, match="largest_layer_params = 20 exceeds total_params 10"):
        zerojax.estimate_zero3_model_states_mem_needs_all_cold(10, 20)


def test_the_command() -> None:
    def run(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["estimate", *args])
        return result.exit_code, result.output

    status, out = run(
        "--params", str(T0_3B), "--largest-layer", "65798144", "--devices-per-node", "1"
    )
    assert status == 0
    assert out.rstrip("\n").endswith(PUBLISHED)
    assert "ZeRO-2" in out
    alone = run("--params", "7e9")[1]
    assert "ZeRO-3" in alone
    assert "assumed" in alone
    for wrong, value in (("-1", "-1.0"), ("1e400", "inf")):
        status, out = run("--params", wrong)
        assert status == 2
        assert f"total_params = {value} must be above 0" in out
