"""Which links collectives cross, of groups made up and of groups compiled for 16 H100s."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.devices.network import nodes_of
from zerojax.devices.rates import Sent
from zerojax.hlo.groups import Groups
from zerojax.hlo.links import sent_by
from zerojax.hlo.program import Shape
from zerojax.hlo.traffic import Collective, collectives

NODES = tuple(device // 8 for device in range(32))
ALL = (tuple(range(32)),)
NODE = tuple(tuple(range(at, at + 8)) for at in range(0, 32, 8))
ACROSS = tuple(tuple(range(at, 32, 8)) for at in range(8))
UNEVEN = (tuple(range(6)), tuple(range(6, 12)))


def collective(kind: str, groups: Groups, elements: int = 480) -> Collective:
    return Collective(kind, (Shape("s8", (elements,)),), groups, 3, True, "c", "main", "")


@pytest.mark.parametrize(
    ("kind", "groups", "sent"),
    [
        ("all-gather", NODE, Sent(420, 0, 7, 0, 8)),
        ("all-gather", ACROSS, Sent(0, 360, 0, 3, 4)),
        ("reduce-scatter", ALL, Sent(465 * 7 / 8, 465 / 8, 28, 3, 32)),
        ("all-reduce", ALL, Sent(930 * 7 / 8, 930 / 8, 14, 4, 32)),
        ("all-reduce", ACROSS, Sent(0, 720, 0, 4, 4)),
        # Of devices 6 to 11 two are on the first node and four on the second.
        ("all-gather", UNEVEN, Sent(200, 200, 4, 1, 6)),
        ("all-to-all", ALL, Sent(480 * 7 / 32, 480 * 24 / 32, 1, 1, 32)),
        ("all-to-all", NODE, Sent(420, 0, 1, 0, 8)),
        ("collective-permute", ((0, 1), (7, 8)), Sent(0, 480, 0, 1, 2)),
        ("collective-permute", ((0, 1), (1, 2)), Sent(480, 0, 1, 0, 2)),
        ("all-gather", tuple((at,) for at in range(32)), Sent(0, 0, 0, 0, 1)),
    ],
)
def test_bytes_and_steps_by_link(kind: str, groups: Groups, sent: Sent) -> None:
    assert sent_by(collective(kind, groups), NODES) == pytest.approx(sent)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(
    ("axes", "gathered", "reduced"),
    [
        # Groups of 8 that are whole hosts, and groups of 2 across them.
        ({"replica": 2, "data": 8}, (7, 0), (0, 1)),
        # The same axes the other way round: 8 on two hosts, 2 neighbours.
        ({"data": 8, "replica": 2}, (7 * 3 / 4, 7 / 4), (1, 0)),
    ],
)
def test_axes_of_a_mesh(
    axes: dict[str, int], gathered: tuple[float, float], reduced: tuple[float, float]
) -> None:
    """bf16[512] a device, gathered over "data", and their sum over "replica"."""
    mesh = zerojax.topology("h100", devices=16, axes=axes)

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.all_gather(x, "data"), jax.lax.psum(x, "replica")

    spec = P(("replica", "data"))
    mapped = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    x = jax.ShapeDtypeStruct((16 * 512,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    text = jax.jit(mapped).lower(x).compile().as_text()
    nodes = nodes_of(mesh)
    assert nodes == (0,) * 8 + (1,) * 8
    sent = {each.kind: sent_by(each, nodes) for each in collectives(text or "")}
    unit = 512 * 4
    assert sent["all-gather"][:2] == pytest.approx([unit * share for share in gathered])
    assert sent["all-reduce"][:2] == pytest.approx([unit * share for share in reduced])
