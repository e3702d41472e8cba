"""Which implementation runs where."""

from pathlib import Path

import jax
import pytest

import zerojax
from pallas_kernels import compat, dispatch
from pallas_kernels.dispatch import Target
from pallas_kernels.measured import FASTER

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


@pytest.mark.parametrize(
    ("kind", "works"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA B200", True),
        ("NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_what_works_on_a_gpu(kind: str, works: bool) -> None:
    assert ("mosaic_gpu" in dispatch.available(Target("gpu", kind))) == works


def test_what_works_on_a_cpu() -> None:
    assert dispatch.target() == Target("cpu", "cpu")
    assert dispatch.available(dispatch.target()) == ("xla",)
    assert dispatch.choose("rms_norm", None) == "xla"
    with compat.simulator():
        assert dispatch.choose("rms_norm", "mosaic_gpu") == "mosaic_gpu"
    with pytest.raises(ValueError, match="where there are: xla"):
        dispatch.choose("rms_norm", "mosaic_gpu")


@pytest.mark.gpu_compile
def test_devices_that_are_not_there_count_within_shard_map() -> None:
    mesh = zerojax.topology("h100", devices=8)
    seen = []

    def look(x: jax.Array) -> jax.Array:
        seen.append((dispatch.target().platform, dispatch.choose("rms_norm", "mosaic_gpu")))
        return x

    spec = jax.sharding.PartitionSpec("data")
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.NamedSharding(mesh, spec))
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec)).trace(x)
    assert seen == [("gpu", "mosaic_gpu")]


def test_a_default_has_a_record() -> None:
    """Nothing is the default that was not measured to be faster."""
    names = ("*-kernels.md", "*-gpu_day.md")
    records = [path.read_text() for name in names for path in RECORDS.glob(name)]
    for kernel, kinds in FASTER.items():
        for kind in kinds:
            assert any(kind in text and kernel in text for text in records), (kernel, kind)
