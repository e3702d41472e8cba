"""`zerojax watch`: the files of `csv_monitor` as a table."""

from pathlib import Path

from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.cli.watch import bars, read
from zerojax.monitor.writers import CsvFiles


def test_a_run_is_drawn(tmp_path: Path) -> None:
    files = CsvFiles(str(tmp_path / "logs" / "job"))
    files.write([("Train/Samples/train_loss", 4.0 / step, 8 * step) for step in range(1, 9)])
    files.write([("Train/Samples/lr", 1e-3, 64)])
    with (tmp_path / "logs" / "job" / "Train_Samples_lr.csv").open("a") as file:
        file.write("72,")  # a row that is being written
    (tmp_path / "other.csv").write_text("name,age\nx,1\n")
    rate, loss = read(tmp_path)
    assert (loss.name, loss.steps[-1], loss.values[-1]) == (
        "logs/job/Train_Samples_train_loss", 64, 0.5,
    )  # fmt: skip
    assert rate.values == [1e-3]
    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
    assert result.exit_code == 0
    assert "train_loss" in result.output
    assert bars(loss.values, 30) in result.output


def test_no_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert result.exit_code == 2
    assert "csv_monitor" in result.output


def test_bars() -> None:
    assert bars([1.0, 1.0], 5) == "▁▁"
    assert bars([0.0, 2.0, 4.0, 6.0], 2) == "▁█"
    assert bars([float("inf"), 1.0, 2.0], 3) == "!▁█"
