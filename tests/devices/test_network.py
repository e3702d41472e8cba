"""The speed of a network by its name, and the nodes of devices."""

import pytest

import zerojax
from zerojax.devices.network import near, network_speed


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("400gb", 400), ("100Gbps", 100), ("12.5 Gb/s", 12.5), ("0.4tb", 400),
        ("3.2tb/host", 400), ("3200gb/host", 400), ("IB-NDR", 400), ("a3-high", 100),
    ],
)  # fmt: skip
def test_speeds(text: str, gigabits: float) -> None:
    assert network_speed(text) == pytest.approx(gigabits * 1e9 / 8)


@pytest.mark.parametrize("text", ["", "400", "fast", "50GB", "0gb", "-1gb", "400gb/node"])
def test_what_is_no_speed(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 400gb, 3\.2tb/host, or ib-hdr"):
        network_speed(text)


def test_devices_of_an_axis_in_one_node() -> None:
    assert near(zerojax.mesh(), "data") == 8
    assert near(zerojax.topology("h100", devices=16), "data") == 8
    groups = zerojax.topology("h100", devices=16, axes={"replica": 2, "data": 8})
    assert (near(groups, "data"), near(groups, "replica")) == (8, 1)
    across = zerojax.topology("h100", devices=16, axes={"replica": 4, "data": 4})
    assert near(across, "data") == 4
    assert near(across, "replica") == 2
