"""What XLA's options prevent."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.xla import compiler


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [8, 64])
def test_a_sum_over_many_gpus_compiles(devices: int) -> None:
    """Without the options the XLA of jax 0.12 ends the process over one of 64 GPUs."""
    mesh = zerojax.topology("h100", devices)
    x = jax.ShapeDtypeStruct(
        (64,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    lowered = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x)
    text = lowered.compile(compiler_options=compiler.options(mesh)).as_text()
    assert [each.kind for each in collectives(text)] == ["all-reduce"]
