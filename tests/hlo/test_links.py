"""Which links collectives cross, of groups made up."""

import pytest

from zerojax.devices.rates import Sent
from zerojax.hlo.groups import Groups
from zerojax.hlo.links import sent_by
from zerojax.hlo.program import Shape
from zerojax.hlo.traffic import Collective

NODES = tuple(device // 8 for device in range(32))
ALL = (tuple(range(32)),)
NODE = tuple(tuple(range(at, at + 8)) for at in range(0, 32, 8))
ACROSS = tuple(tuple(range(at, 32, 8)) for at in range(8))
UNEVEN = (tuple(range(6)), tuple(range(6, 12)))


def collective(kind: str, groups: Groups, elements: int = 480) -> Collective:
    return Collective(kind, (Shape("s8", (elements,)),), groups, 3, "c", "main", "")


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
