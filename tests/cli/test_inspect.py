"""`zerojax inspect`: the tables, the JSON, and the exit status."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from checkpoint.recorded import flip, save_plain, tree, write
from checkpoint.recorded import made as made
from checkpoint.recorded import steps as steps
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.checkpoint.inspection import inspect
from zerojax.cli.inspect_table import SHOWN


def damage(folder: Path) -> Path:
    """One bit in the middle of the arrays."""
    data = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    flip(data, data.stat().st_size // 2)
    return data


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, args)], env={"COLUMNS": "1000"})


def row(output: str, first: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_complete_steps(made: Path) -> None:
    result = run(made)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    on_disk = sum(f.stat().st_size for f in (made / "100").rglob("*") if f.is_file())
    assert row(result.output, "90")[1:4] == ["2026-01-02", "03:04", "complete"]
    assert row(result.output, "100")[4:7] == ["10", "12.5", "kB"]
    assert row(result.output, "100")[7] == f"{on_disk / 1000:.3g}"
    lines = [line.strip() for line in result.output.splitlines()]
    about = lines[lines.index("step 100:") + 1 :]
    assert [re.sub(" +", " ", line) for line in about[:4]] == [
        "state: linen, stage 2, computed in bfloat16",
        "mesh: data 8 of NVIDIA H100, 1 process",
        "versions: zerojax 0.1.0, jax 0.10.2",
        "sizes: parameters 6.32 kB, optimizer state 6.14 kB, other state 80 B",
    ]
    assert about[4].split()[:6] == ["dtypes:", "float32", "12.3", "kB,", "bfloat16", "160"]
    assert about[5].split() == ["metrics:", "loss", "2.5"]
    assert "restore(" not in result.output


def test_the_folder_of_a_run(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "run" / "checkpoints")
    result = run(tmp_path / "run", "--quick")
    assert result.exit_code == 0, result.output
    assert row(result.output, "100") == row(run(made, "--quick").output, "100")


def test_arrays_are_listed(made: Path) -> None:
    assert "params.wide" not in run(made).output
    output = run(made, "--leaves").output
    assert row(output, "params.wide")[1:] == ["64x24", "float32", "P('data')", "6.14", "kB"]
    assert row(output, "int4")[1:] == ["9", "int4", "9", "B"]
    assert row(output, "key")[1:3] == ["scalar", "key<fry>"]


def test_damage_is_told_and_another_step_offered(steps: Path) -> None:
    data = damage(steps / "100")
    result = run(steps)
    assert result.exit_code == 1
    assert row(result.output, "90")[3] == "complete"
    assert row(result.output, "100")[3] == "damaged"
    lines = result.output.splitlines()
    assert lines[lines.index("step 100 is damaged:") :] == [
        "step 100 is damaged:",
        f"  {data} was changed after the save: its CRC differs",
        f"  {steps}/100/state: opt_state.0.mu differs from what was saved",
        "step 90 is complete: restore(abstract_state, step=90)",
    ]


def test_what_is_offered_where_less_was_looked_at(steps: Path) -> None:
    damage(steps / "100")
    result = run(steps, "--quick")
    assert result.exit_code == 1
    says = "step 90's files are complete: restore(abstract_state, step=90)"
    assert result.output.splitlines()[-1] == says


def test_many_problems_are_cut_short(steps: Path) -> None:
    record = write(steps / "100", tree(100))
    gone = {f"state/gone{i}": record.files["state/_METADATA"] for i in range(SHOWN + 7)}
    write(steps / "100", tree(100), files={**record.files, **gone})
    output = run(steps).output
    assert output.count("is missing") == SHOWN
    assert "  and 7 more (--json has them all)" in output
    told = json.loads(run(steps, "--json").stdout)
    problems = told["steps"][1]["problems"]
    assert len(problems) == SHOWN + 7


def test_plain_orbax_is_no_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        save_plain(tmp_path, step, tree())
    result = run(tmp_path)
    assert result.exit_code == 0
    assert row(result.output, "1")[1:3] == ["not", "verifiable"]
    assert "linen, without a record" in result.output
    assert "step 1, step 2: no zerojax.json (saved by plain orbax)" in result.output
    assert run(tmp_path / "2").output.count(str(tmp_path / "2")) == 0  # it is step 2


def test_what_is_no_step(steps: Path) -> None:
    (steps / "110.orbax-checkpoint-tmp").mkdir()
    (steps / ".deleted" / "80").mkdir(parents=True)
    result = run(steps)
    assert result.exit_code == 0
    assert "110.orbax-checkpoint-tmp: being saved, or left by a killed run" in result.output
    assert "80: deleted, its files are still to go" in result.output


def test_json_says_the_same(steps: Path) -> None:
    data = damage(steps / "100")
    (steps / "110.orbax-checkpoint-tmp").mkdir()
    result = run(steps, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    found = inspect(steps)
    assert told["newest_intact"] == 90
    assert told["unfinished"] == ["110.orbax-checkpoint-tmp"]
    assert [step["step"] for step in told["steps"]] == [90, 100]
    step = told["steps"][1]
    assert step["status"] == "damaged"
    assert step["problems"] == list(found.steps[1].problems)
    assert str(data) in step["problems"][0]
    assert step["bytes"] == found.steps[1].sizes
    assert step["mesh"] == {"data": 8}
    assert step["arrays"] == 10
    assert step["versions"]["jax"] == "0.10.2"
    assert "leaves" not in step
    leaves = json.loads(run(steps, "--json", "--leaves").stdout)["steps"][1]["leaves"]
    assert {leaf["name"]: leaf["spec"] for leaf in leaves}["params.wide"] == ["data"]


def test_no_checkpoint(tmp_path: Path, made: Path) -> None:
    (tmp_path / "file").write_text("")
    for args, says in [
        ([tmp_path], "holds no checkpoint (it holds file): check the path"),
        ([tmp_path / "none"], "none does not exist"),
        ([tmp_path / "file"], "holds no checkpoint (it is a file)"),
        ([made, "--step", 3], "has no step 3; it has 90, 100"),
    ]:
        result = run(*args)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
