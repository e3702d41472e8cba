"""The registered rows of the scoreboard, and the errors that are computed of them."""

import json
from typing import Any

import pytest

from benchmarks.scoreboard import KEPT, REGISTERED, Score, summary
from zerojax.devices.network import network_speed
from zerojax.foresight.devices import parse_devices

TABLE = json.loads(REGISTERED.read_text())


def test_each_row_names_a_model_devices_and_a_source() -> None:
    for row in TABLE["rows"]:
        assert row["model"] in TABLE["models"]
        kind, devices = row["devices"].split(":")
        assert int(devices) > 0
        assert parse_devices(f"{kind}:1", None)[1].kind == kind if kind != "v6e" else True
        assert "network" not in row or network_speed(row["network"]) > 0
        assert row["source"].startswith("https://github.com/")
        assert row["tokens_per_second"] > 0
        words = {"none", "whole blocks", "not stated", *KEPT}
        assert row["remat"] in words or row["remat"].startswith("custom: ")


def test_errors_count_every_row() -> None:
    class Made(Score):
        @property
        def computed(self) -> Any:
            return self.row["computed"]

    rows = [("JAX", 110), ("JAX", None), ("torch FSDP", 70), ("torch FSDP", 100)]
    scores = [
        Made({"framework": framework, "tokens_per_second": 100, "computed": computed}, None)
        for framework, computed in rows
    ]
    _, every, jax, torch = summary(scores)
    assert every == ["all", "3", "1", "13.3%", "10.0%", "30.0%", "2 of 3"]
    assert jax == ["JAX", "1", "1", "10.0%", "10.0%", "10.0%", "1 of 1"]
    assert torch[:3] == ["torch", "2", "0"]


def test_a_row_that_is_not_compiled_says_why() -> None:
    row = next(row for row in TABLE["rows"] if "v6e" in row["devices"])
    *_, computed, error, reason = Score(row, None, "not compiled: no libtpu").cells
    assert (computed, error, reason) == ("", "", "not compiled: no libtpu")


@pytest.mark.parametrize("model", ["mpt-7b", "mpt-13b", "mpt-30b", "mpt-70b"])
def test_the_sizes_are_those_of_the_published_parameters(model: str) -> None:
    """The published numbers of parameters, with 2048 positions."""
    published = {
        "mpt-7b": 6658859008, "mpt-13b": 12853954560, "mpt-30b": 29975214080,
        "mpt-70b": 64862437376,
    }  # fmt: skip
    sizes = TABLE["models"][model]
    width, layers = sizes["width"], sizes["layers"]
    block = 12 * width**2 + 13 * width
    assert layers * block + (sizes["vocabulary"] + 2048 + 2) * width == published[model]
