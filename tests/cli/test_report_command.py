"""`zerojax report`: the tables, the JSON, and the exit status."""

import json
import re

import jax
import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.cli.machine import Devices, Machine, Package
from zerojax.cli.report import show
from zerojax.cli.terminal import as_json

H100 = Devices(
    platform="gpu",
    kind="NVIDIA H100 80GB HBM3",
    count=16,
    processes=2,
    memories=("device", "pinned_host"),
    limit=63_000_000_000,
    driver="PJRT C API, cuda 13000",
    capability="9.0",
)
MADE = Machine(
    python="3.12.1 on Linux x86_64",
    devices=(H100,),
    packages=(Package("jax", "0.12.0", "<0.12"), Package("optax", None)),
)


def lines(found: Machine, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The cells of what is printed, by the first of them."""
    show(found)
    printed = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells[1:] for cells in printed}


def test_the_tables_say_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    told, rows = json.loads(json.dumps(as_json(MADE))), lines(MADE, capsys)
    assert rows["python"] == [told["python"]]
    for package in told["packages"]:
        texts = [package["version"] or "not installed", package["wanted"]]
        assert rows[package["name"]] == [text for text in texts if text]
    (device,) = told["devices"]
    platform, count, says = rows[device["kind"]]
    assert (platform, count) == (device["platform"], str(device["count"]))
    assert says.split("; ") == [
        "2 processes",
        "device, pinned_host",
        "63 GB each for a program",
        "compute capability 9.0",
        "PJRT C API, cuda 13000",
    ]


@pytest.mark.slow
def test_here() -> None:
    result = CliRunner().invoke(app, ["report", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(d["platform"], d["count"]) for d in told["devices"]] == [("cpu", jax.device_count())]
    versions = {package["name"]: package["version"] for package in told["packages"]}
    assert versions["jax"] == jax.__version__
