"""Which writers a config opens, and what is said of missing packages."""

import sys
import types

import pytest

from zerojax.config import ZeroConfig
from zerojax.monitor import Reporter
from zerojax.monitor.writers import open_writers


@pytest.mark.parametrize(
    ("section", "module", "install"),
    [
        ("tensorboard", "tensorboard", r"zerojax\[monitor\]"),
        ("wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_before_training(monkeypatch, section, module, install):
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    config = ZeroConfig.from_keywords(**{section: {}})
    with pytest.raises(ImportError, match=f"`{section}` needs the package {section}.*{install}"):
        Reporter(config)
    assert not Reporter(ZeroConfig()).active


def test_csv_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert Reporter(ZeroConfig.from_keywords(csv_monitor={})).active


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, report):
    (tmp_path / "logs").touch()
    config = ZeroConfig.from_keywords(csv_monitor={"output_path": str(tmp_path / "logs")})
    reporter = Reporter(config)
    with pytest.raises(OSError, match="logs"):
        reporter.open()
    with pytest.raises(OSError, match="logs"):
        reporter.record(report(), None, 8)


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
@pytest.mark.parametrize(
    ("path", "why"),
    [("file", "Not a directory"), ("a\0b", "null"), ("n" * 300, "File name too long")],
)
def test_the_key_and_the_path_are_named(tmp_path, section, path, why):
    (tmp_path / "file").touch()
    path = str(tmp_path / path)
    config = ZeroConfig.from_keywords(**{section: {"output_path": path, "job_name": "j"}})
    with pytest.raises(
        OSError, match=rf"{section}\.output_path: .*{why}.* out of the config"
    ) as told:
        open_writers(config)
    assert told.value.filename == f"{path}/j"


def test_those_that_are_open_are_closed_when_another_fails(tmp_path, monkeypatch):
    closed = []

    class Board:
        def __init__(self, folder):
            self.where = folder

        def close(self):
            closed.append(self.where)

    def init(**_):
        raise ConnectionError("no network")

    monkeypatch.setattr("zerojax.monitor.tensorboard_file.TensorBoardFile", Board)
    fake = types.SimpleNamespace(run=None, init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = ZeroConfig.from_keywords(
        tensorboard={"output_path": str(tmp_path), "job_name": "a"}, wandb={}
    )
    with pytest.raises(ConnectionError, match="no network"):
        open_writers(config)
    assert closed == [str(tmp_path / "a")]
