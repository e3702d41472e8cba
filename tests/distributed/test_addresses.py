"""Where process 0 listens, and what keeps others from it."""

import socket

import pytest

from zerojax.distributed.addresses import avoid_proxy, split, where_to_listen, wrong_loopback
from zerojax.distributed.launched import Launched

HERE = socket.gethostname()
NAME = "127.1"
"""Resolves to a loopback address as a host's name may, and is no address in its proper form."""


def test_host_and_port() -> None:
    assert split("n1:4000") == ("n1", 4000)
    assert split("[fe80::1]:4000") == ("fe80::1", 4000)


@pytest.mark.parametrize(
    ("coordinator", "several_hosts", "place"),
    [
        ("localhost:4000", None, "127.0.0.1:4000"),
        (f"{NAME}:4000", False, "127.0.0.1:4000"),
        ("[::1]:4000", False, "[::1]:4000"),
        (f"{NAME}:4000", True, "[::]:4000"),  # as Debian names a host to itself
        ("192.0.2.1:4000", False, "[::]:4000"),  # of another machine, which passes on
        ("no-such-name.invalid:4000", True, "[::]:4000"),
    ],
)
def test_only_this_machine_is_let_in_where_that_is_enough(
    coordinator: str, several_hosts: bool | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Launched(coordinator, 2, 0, several_hosts, 0, "torchrun")
    assert where_to_listen(me) == place
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:5")
    assert where_to_listen(me) == "10.0.0.1:5"


def test_other_machines_are_let_in_at_the_address_that_they_were_given() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as packets:
        try:
            packets.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        own = packets.getsockname()[0]
    assert where_to_listen(Launched(f"{own}:4000", 2, 0, True, 0, "torchrun")) == f"{own}:4000"


@pytest.mark.parametrize(
    ("coordinator", "several_hosts", "refused"),
    [
        ("localhost:1", True, True),
        ("127.0.1.1:1", True, True),
        (f"{NAME}:1", True, True),
        (f"{HERE}:1", True, False),  # Debian's
        ("localhost:1", False, False),
        ("localhost:1", None, False),
        ("192.0.2.1:1", True, False),
        ("no-such-name.invalid:1", True, False),
    ],
)
def test_coordinator_at_a_loopback(
    coordinator: str, several_hosts: bool | None, refused: bool
) -> None:
    said = wrong_loopback(Launched(coordinator, 2, 1, several_hosts, 0, "torchrun"))
    assert bool(said) == refused
    if refused:
        assert f"the coordinator {coordinator} (torchrun) is the loopback of {HERE}" in said
        assert "name the host of process 0 by an address that the others reach" in said


@pytest.mark.parametrize(
    ("environ", "exempt"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"http_proxy": "p:1"}, ",n1"),
        ({"https_proxy": "p:1", "no_proxy": "a"}, "a,n1"),
        ({"grpc_proxy": "p:1", "no_proxy": "a", "no_grpc_proxy": "b"}, "b,n1"),
    ],
)
def test_proxies_are_avoided(environ: dict[str, str], exempt: str | None) -> None:
    avoid_proxy("n1:4000", environ)
    assert environ.get("no_grpc_proxy") == exempt
