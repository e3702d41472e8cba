"""`zerojax report`: the tables, the JSON, and the exit status."""

import json
import re

import jax
import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.cli.report_table import show, to_json
from zerojax.doctor.packages import Extra, Package
from zerojax.doctor.report import Devices, Report

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
MADE = Report(
    python="3.12.1 on Linux x86_64",
    devices=(H100,),
    packages=(
        Package("jax", "0.12.0", "<0.12", "pip install 'jax[k8s]<0.12'"),
        Package("optax", None),
    ),
    environment={"XLA_FLAGS": "--a=[red]"},
    extras=(
        Extra("monitor", False, ("tensorboard>=2.16", "x"), "pip install -e '.[monitor]'"),
        Extra("export", True),
    ),
)


def lines(found: Report, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The cells of what is printed, by the first of them."""
    show(found)
    printed = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return {cells[0]: cells[1:] for cells in printed}


def test_the_tables_say_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    told, rows = json.loads(json.dumps(to_json(MADE))), lines(MADE, capsys)
    assert rows["python"] == [told["python"]]
    for package in told["packages"]:
        texts = [package["version"] or "not installed", package["wanted"], package["remedy"]]
        assert rows[package["name"]] == [text for text in texts if text]
    assert rows["XLA_FLAGS"] == [told["environment"]["XLA_FLAGS"]]
    for extra in told["extras"]:
        texts = [extra["remedy"], ", ".join(extra["missing"])]
        assert rows[extra["name"]] == ["yes" if extra["installed"] else "no", *filter(None, texts)]
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
