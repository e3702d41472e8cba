"""`zerojax export`: the options, the line at the end, and the exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import recorded
from safetensors.numpy import load_file
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.checkpoint.naming import Renamed

ROOT = Path(__file__).parents[2]


def upper(leaves, extra):
    """For ``--names``."""
    return Renamed({name: name.upper() for name in leaves}, {"about.txt": extra})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("steps")
    for step in (1, 2):
        params = {"w": jnp.full((4, 3), step, jnp.float32), "b": jnp.arange(3)}
        recorded.save(directory, step, {"params": params}, extra="hello")
    return directory


def run(*args):
    return CliRunner().invoke(app, ["export", *map(str, args)])


def test_one_line_says_what_was_written(folder, tmp_path):
    result = run(folder, tmp_path / "out")
    assert result.exit_code == 0
    told = rf"{tmp_path}/out: 1 file, 2 tensors, 60 bytes, float32 and int32, \d+\.\d s\n"
    assert re.fullmatch(told, result.output)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"][0, 0] == 2


def test_json(folder, tmp_path):
    told = json.loads(run(folder, tmp_path / "out", "--json").stdout)
    seconds = told.pop("seconds")
    assert seconds > 0
    assert told == {
        "out": f"{tmp_path}/out",
        "files": ["model.safetensors"],
        "tensors": 2,
        "nbytes": 60,
        "dtypes": ["float32", "int32"],
    }


def test_every_option_arrives(folder, tmp_path):
    options = ["--step", 1, "--dtype", "bf16", "--max-shard-size", "20B"]
    result = run(folder, tmp_path / "out", *options, "--names", "cli.test_export_command:upper")
    assert result.exit_code == 0
    assert "out: 4 files, 2 tensors, 36 bytes, bfloat16 and int32, " in result.output
    assert (tmp_path / "out" / "about.txt").read_text() == "hello"
    found = load_file(tmp_path / "out" / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(found["W"].astype(np.float32), np.ones((4, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", 5], "has no step 5; it has 1, 2"),
        (["--names", "cli.test_export_command"], "pass MODULE:FUNCTION"),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(options, message, folder, tmp_path):
    result = run(folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_no_gpu_is_touched(folder, tmp_path):
    """A platform that is not there fails where JAX is let to choose it."""
    command = [sys.executable, "-m", "zerojax", "export", str(folder / "1"), str(tmp_path / "out")]
    env = os.environ | {"JAX_PLATFORMS": "cuda"}
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "1 file, 2 tensors" in told.stdout
    assert not told.stderr
