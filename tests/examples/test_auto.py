"""What the examples' commands say for the "auto" of a config."""

import json
from pathlib import Path

import pytest

from examples.auto import filled
from examples.run_clm.job import Job
from examples.run_glue.job import Job as GlueJob
from zerojax import zero

VALUES = {
    "optimizer.params.lr": 1e-3,
    "scheduler.params.total_num_steps": 30,
    "train_batch_size": 8,
}
CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
YAML = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A JSON, and a YAML that names it."""
    paths = [tmp_path / "ds.json", tmp_path / "default_config.yaml"]
    for path, text in zip(paths, (json.dumps(CONFIG), YAML), strict=True):
        path.write_text(text)
    return paths


def test_only_auto_is_filled(files: list[Path]) -> None:
    for file in files:
        assert filled(file, VALUES) == dict([*VALUES.items()][:2])
        given = {"optimizer.params.weight_decay": ("weight_decay", 0.2)}
        with pytest.raises(ValueError, match=r"--weight_decay 0.2, but .* has .* = 0.1: leave"):
            filled(file, VALUES, given)
    assert filled(files[0].with_name("none.json"), VALUES) == {}


def test_the_length_of_the_run_is_known(files: list[Path]) -> None:
    options = dict.fromkeys(Job.__dataclass_fields__) | {"learning_rate": 5e-4}
    for file in files:
        for auto in (
            Job(**options | {"config": file}).auto(300),
            GlueJob(config=file, learning_rate=5e-4)._auto(300),
        ):
            config = zero(file, auto=auto).config
            assert config.optimizer is not None
            assert config.scheduler is not None
            assert config.optimizer.params["lr"] == 5e-4
            assert config.scheduler.params["total_num_steps"] == 300
