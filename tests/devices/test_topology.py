"""Meshes of absent devices."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zerojax.devices.network import nodes_of
from zerojax.devices.topology import device_kinds, topology


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestMesh:
    @pytest.mark.parametrize("name", [*device_kinds()["gpu"], "a100-80gb", "H100"])
    def test_default_is_one_data_axis(self, name: str) -> None:
        mesh = topology(name)
        assert dict(mesh.shape) == {"data": 8}
        assert mesh.axis_types == (AxisType.Auto,)
        assert mesh.devices.flat[0].device_kind.startswith("NVIDIA")

    def test_an_nvlink_domain_of_several_hosts_is_one_node(self) -> None:
        assert set(nodes_of(topology("gb200", 64))) == {0}
        assert set(nodes_of(topology("gb300", 144))) == {0, 1}
        assert set(nodes_of(topology("b300", 64))) == set(range(8))

    def test_two_of_a_kind_have_the_same_devices(self) -> None:
        one, other = topology("h100", 8), topology("h100", 8)
        assert one == other
        groups = topology("h100", 8, axes={"data": 2, "model": 4})
        assert groups.devices.flat[3] is one.devices.flat[3]
        assert topology("a100", 8) != one
        # A program may have specs on one mesh and arrays on another.
        x, out = (NamedSharding(mesh, PartitionSpec("data")) for mesh in (one, other))
        shape = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=x)
        jax.jit(lambda x: 2 * x, out_shardings=out).lower(shape).compile()

    @pytest.mark.parametrize("replicas", [4, "hosts"])
    def test_replica_groups_of_whole_hosts(self, replicas: Any) -> None:
        mesh = topology("h100", 32, replicas=replicas)
        assert dict(mesh.shape) == {"replica": 4, "data": 8}
        assert all(len({d.process_index for d in group}) == 1 for group in mesh.devices)

    @pytest.mark.parametrize("name", list(device_kinds()["gpu"]))
    def test_compiles(self, name: str) -> None:
        mesh = topology(name)
        x = jax.ShapeDtypeStruct(
            (8, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
        )
        out = NamedSharding(mesh, PartitionSpec())
        text = jax.jit(lambda x: x.sum(0), out_shardings=out).lower(x).compile().as_text()
        assert "all-reduce" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["environment", "config", "neither"])
    def test_whichever_way_jax_is_told_not_to_look_for_a_gpu(self, how: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        if how == "environment":
            environment["JAX_PLATFORMS"] = "cpu"
        config = "jax.config.update('jax_platforms', 'cpu')" if how == "config" else ""
        script = (
            f"import jax; {config}\n"
            "from zerojax.devices.topology import topology\n"
            "try: print(topology('h100').size)\n"
            "except RuntimeError as error: print(error)"
        )
        result = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        # Where CUDA's own libraries are installed, nothing needs to be said at all.
        assert result.stdout.strip() == "8" or (
            how == "neither" and "set JAX_PLATFORMS=cpu" in result.stdout
        ), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "h10"}, r"unknown device kind 'h10'\. Did you mean 'h100'\?"),
        ({"name": "abacus"}, "Known: a100, a100-40gb"),
        ({"name": "V100"}, "device kind 'V100': .* no longer compiles for compute capability 7.0"),
        ({"name": "mi300x"}, "only in a jax with the ROCm plugin"),
        ({"name": "gb200", "devices": 100}, "not a multiple of NVLink domains of 72 GPUs"),
        ({"name": "h100", "devices": 0}, "devices must be an int from 1 to"),
        ({"name": "h100", "devices": 10**5000}, "devices must be an int from 1 to 131,072"),
        ({"name": "h100", "devices": 12}, "take 8 or 16, or at most 8"),
        ({"name": "v5e", "devices": 2}, "take 4"),
        ({"name": "h100", "axes": {"data": 2, "model": 3}}, "data=2 x model=3 multiply out to 6"),
        ({"name": "h100", "devices": 64, "replicas": 12}, "does not divide 64 .*pass 8 or 16"),
        ({"name": "h100", "axes": {"a": -2, "b": -4}}, "change a size"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topology(**arguments)


@pytest.mark.parametrize(("name", "extra"), [("h100", "compile"), ("v5p", "tpu")])
def test_missing_wheels(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{extra}\]'"):
        topology(name)


def test_every_kind_has_its_source() -> None:
    kinds = device_kinds()
    shared = {"rates", "reached", "common", "latency"}
    assert set(kinds["sources"]) == {*kinds["gpu"], *kinds["tpu"], *shared}
