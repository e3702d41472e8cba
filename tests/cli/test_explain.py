"""`zerojax explain`: the table, the JSON, and the exit status."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.config.explain import explain

LONG = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "legacy_stage1": True,
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    "fp16": {"enabled": True, "loss_scale": "big [red]"},
    "gradient_clipping": "auto",
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LONG))
    return path


def run(*args):
    return CliRunner().invoke(app, ["explain", *map(str, args)], env={"COLUMNS": "1000"})


def test_one_line_a_key_where_it_is_piped(path):
    result = run(path)
    assert result.exit_code == 2
    lines = result.output.splitlines()
    at = lines.index("3 problems:")
    assert lines[at + 1 :] == [f"  {problem}" for problem in explain(path).problems]
    for row in explain(path).rows:
        (line,) = [line for line in lines[:at] if line.split()[:1] == [row.key]]
        assert row.became in line
        assert row.why in line
    assert "2 wrong" in lines[at - 1]
    assert "1 refused" in lines[at - 1]


def test_json_says_the_same(path):
    result = run(path, "--json")
    assert result.exit_code == 2
    told = json.loads(result.output)
    found = explain(path)
    assert told["problems"] == list(found.problems)
    assert [row["key"] for row in told["keys"]] == [row.key for row in found.rows]
    rows = {row["key"]: row for row in told["keys"]}
    assert rows["gradient_clipping"] == {
        "key": "gradient_clipping",
        "given": "auto",
        "resolved": 1.0,
        "became": "resolved",
        "why": "the default, 1.0",
    }
    assert "given" not in rows["scheduler.params.warmup_num_steps"]


def test_stand_ins(path):
    key = "scheduler.params.total_num_steps"
    rows = json.loads(run(path, "--json", "--auto", f"{key}=300").output)["keys"]
    assert [row["resolved"] for row in rows if row["key"] == key] == [300]
    wrong = run(path, "--auto", f"{key}=many")
    assert 'expected an integer of at least 1, got "many"' in wrong.output
    assert "expected KEY=VALUE" in run(path, "--auto", key).output


def test_all_keys(path):
    path.write_text("{}")
    result = run(path, "--all")
    assert result.exit_code == 0
    assert "zero_optimization.legacy_stage1" in result.output
    assert "fp16.consecutive_hysteresis" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "no such file"), ("{", "not valid JSON at line 1"), ("[]", "expected an object")],
)
def test_what_cannot_be_read(tmp_path, text, says):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    result = run(path)
    assert result.exit_code == 2
    assert says in result.stderr
    assert str(path) in result.stderr
    assert result.stdout == ""


def test_the_module_runs(path):
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "explain", str(path)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"COLUMNS": "1000", "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) > 100
    usage = CliRunner().invoke(app, [])
    assert "explain" in usage.output


def test_accelerates_yaml(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text("distributed_type: FSDP\nmixed_precision: no\nfsdp_config: {sharding: 1}\n")
    result = run(path)
    assert result.exit_code == 2
    assert "fsdp_config.fsdp_sharding: unknown key; did you mean" in result.output
    path.write_text("distributed_type: FSDP\nnum_processes: 8\ntpu_name: 2026-01-01\n")
    result = run(path, "--json")
    assert result.exit_code == 0
    rows = {row["key"]: row for row in json.loads(result.output)["keys"]}
    assert rows["zero_optimization.stage"]["resolved"] == 3
    assert rows["num_processes"]["became"] == "left to launch"
    assert rows["tpu_name"]["given"] == "2026-01-01"
    assert "num_processes" in run(path).output
    path.write_text("a: [")
    assert run(path).exit_code == 2
