"""What theory asks of the network between hosts of 8."""

import pytest

from benchmarks.measure import Case, expected_between

P = 10**9


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"devices": 8}, 0),
        ({"devices": 12}, 3 / 2),  # two hosts, of which one is half used
        ({"devices": 24}, 3 * 2 / 3),
        ({"devices": 64, "stage": None}, 3 * 7 / 8),
        ({"devices": 64, "stage": 1, "accumulate": 4}, 2 * 7 / 8),
        ({"devices": 64, "stage": 2, "accumulate": 4}, 5 * 7 / 8),
        ({"devices": 64, "accumulate": 4}, 12 * 7 / 8),
        ({"devices": 64, "accumulate": 4, "partition": 8}, 5 * 7 / 8),
        # Groups of a host each: all pieces are summed between hosts.
        ({"devices": 64, "replicas": 8}, 2 * 7 / 8),
        ({"devices": 64, "replicas": 8, "stage": 1, "accumulate": 4}, 2 * 7 / 8),
        # Of 4 hosts each: a host sums a quarter of the pieces with one other.
        ({"devices": 64, "replicas": 2}, 3 * 3 / 4 + 1 / 4),
        # Two in a host: its own are summed inside it.
        ({"devices": 16, "replicas": 4}, 1),
    ],
)
def test_passes_that_come_into_a_host(changes, passes):
    case = Case(**{"stage": 3, **changes})
    assert expected_between(case, P) == pytest.approx(passes * 2 * P, rel=1e-9)
