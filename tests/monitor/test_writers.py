"""Which writers a config opens, and what each of them writes."""

import errno
import sys
import types
from pathlib import Path

import pytest

from zerojax.config import WandbConfig, ZeroConfig
from zerojax.monitor.after_step import AfterStep
from zerojax.monitor.writers import CsvFiles, TensorBoardFile, WandbRun, open_writers


@pytest.mark.parametrize(
    ("section", "module", "install"),
    [
        ("tensorboard", "tensorboard", r"pip install -e .\.\[monitor\].,"),
        ("wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_before_training(monkeypatch, section, module, install):
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    config = ZeroConfig.from_keywords(**{section: {}})
    with pytest.raises(ImportError, match=f"`{section}` needs the package {section}.*{install}"):
        AfterStep(config)
    assert not AfterStep(ZeroConfig()).logs


@pytest.mark.parametrize(
    ("section", "path", "why"),
    [("csv_monitor", "file", "Not a directory"), ("tensorboard", "a\0b", "null")],
)
def test_the_key_and_the_path_are_named(tmp_path, section, path, why):
    (tmp_path / "file").touch()
    path = str(tmp_path / path)
    config = ZeroConfig.from_keywords(**{section: {"output_path": path, "job_name": "j"}})
    with pytest.raises(OSError, match=rf"{section}\.output_path .*{why}.* from the config") as told:
        open_writers(config)
    assert told.value.filename == f"{path}/j"


def test_layout_of_csv_files(tmp_path):
    writer = CsvFiles(str(tmp_path / "run" / "job"))
    writer.write({"Train/Samples/lr": 0.001, "a b,c": -1.5}, 8)
    writer.write({"Train/Samples/lr": 1e-9}, 16)
    writer.close()
    files = {path.name: path.read_bytes() for path in (tmp_path / "run" / "job").iterdir()}
    assert files == {
        "Train_Samples_lr.csv": b"step,lr\r\n8,0.001\r\n16,1e-09\r\n",
        "a_b,c.csv": b'step,"a b,c"\r\n8,-1.5\r\n',
    }


def test_a_file_that_is_there_is_continued_without_a_second_header(tmp_path):
    for samples, value in ((8, 1.0), (16, float("nan"))):
        CsvFiles(str(tmp_path)).write({"loss": value}, samples)
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\r\n8,1.0\r\n16,nan\r\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_said_with_the_file(tmp_path):
    (tmp_path / "a.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        CsvFiles(str(tmp_path)).write({"a": 1.0}, 8)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "a.csv"))


STEPS = [
    ({"Train/Samples/train_loss": 0.5, "Train/Samples/lr": 0.001}, 8),
    ({"Train/Samples/train_loss": float("inf")}, 16),
]


def test_event_files_are_read_back(tmp_path):
    reason = "reads the files with tensorboard: pip install -e '.[monitor]'"
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(module, reason=reason)
    folder = str(tmp_path / "run" / "job")
    for figures, samples in STEPS:  # a run that was resumed: two files
        writer = TensorBoardFile(folder)
        writer.write(figures, samples)
        writer.close()
    found = reader.EventAccumulator(folder)
    found.Reload()
    read = {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }
    assert read == {
        "Train/Samples/train_loss": [(8, 0.5), (16, float("inf"))],
        "Train/Samples/lr": [(8, pytest.approx(0.001))],
    }


class Wandb(types.ModuleType):
    """A stand-in for the package wandb: the real one wants an account."""

    def __init__(self):
        super().__init__("wandb")
        self.run, self.calls = None, []

    def init(self, **given):
        self.calls.append(("init", given))
        self.run = types.SimpleNamespace(log=self.log, finish=self.finish)
        return self.run

    def log(self, values, step):
        self.calls.append(("log", values, step))

    def finish(self):
        self.calls.append(("finish",))
        self.run = None


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_wandb_run_of_its_own(wandb):
    run = WandbRun(WandbConfig(project="p", team="t", group="g"))
    run.write({"loss": 0.5, "lr": 0.1}, 8)
    run.write({"loss": 0.25}, 16)
    run.close()
    assert wandb.calls == [
        ("init", {"project": "p", "entity": "t", "group": "g"}),
        ("log", {"loss": 0.5, "lr": 0.1}, 8),
        ("log", {"loss": 0.25}, 16),
        ("finish",),
    ]


def test_the_users_wandb_run_is_used_and_left_open(wandb):
    wandb.run = object()
    run = WandbRun(WandbConfig())
    run.write({"loss": 0.5}, 8)
    run.close()
    assert wandb.calls == [("log", {"loss": 0.5}, 8)]


def test_flushed_logs_go_on_in_one_wandb_run_and_another_step_has_its_own(wandb):
    config = ZeroConfig.from_keywords(wandb={})
    first, second = AfterStep(config), AfterStep(config)
    first.write({"loss": 0.5}, 8)
    first.flush()
    first.write({"eval_loss": 0.25}, 8)
    second.write({"loss": 0.75}, 8)
    second.close()
    calls = [call if call[0] == "log" else call[0] for call in wandb.calls]
    assert calls == [
        "init", ("log", {"loss": 0.5}, 8), ("log", {"eval_loss": 0.25}, 8), "finish",
        "init", ("log", {"loss": 0.75}, 8), "finish",
    ]  # fmt: skip
