"""What XLA's options prevent, and when they are chosen."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.xla import compat, compiler


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


def test_options_that_wait_for_the_trace_cost_no_second_trace() -> None:
    traces: list[int] = []

    def double(x: jax.Array) -> jax.Array:
        traces.append(1)
        return 2 * x

    def choose() -> compiler.Options:
        assert traces  # the options may depend on what the trace has decided
        return {"xla_cpu_enable_fast_math": False}

    jitted = compiler.JitOnceDecided(double, choose)
    traced = jitted.trace(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert compat.compiler_options(traced.lower()) == choose()
    assert jitted(jnp.ones(3)).tolist() == [2, 2, 2]
    jitted.save_memory()
    assert jitted(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(traces) == 1


def test_the_limit_as_xla_prints_it() -> None:
    """GPT-2 XL without remat, 5 rows on each of 8 H100s: "Can't reduce memory use below 60.23GiB
    (64673714722 bytes) by rematerialization"."""
    assert abs(compiler.memory_limit(84942979072, 2341422116) - 64673714722) < 100_000
