"""What the main job makes of "auto" in its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import zerojax
from examples.run_clm.auto import resolved
from examples.run_clm.job import DEFAULT_CONFIG, Job


def job(config: Path, **options: Any) -> Job:
    defaults: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    given = {"config": config, "config_name": "tiny", "block_size": 16, "scan": True, "remat": True}
    return Job(**defaults | {"dropout": 0.0} | given | options)


@pytest.fixture
def auto(tmp_path: Path) -> Path:
    path = tmp_path / "auto.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {
        "stage": "auto",
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
    }
    path.write_text(json.dumps({"optimizer": optimizer, "zero_optimization": zero}))
    return path


def test_a_config_that_says_all_is_kept() -> None:
    chosen = resolved(job(DEFAULT_CONFIG), zerojax.mesh(), 300, Console())
    assert chosen.config == zerojax.zero(DEFAULT_CONFIG).config


def test_on_cpus_nothing_can_be_chosen(auto: Path) -> None:
    with pytest.raises(ValueError, match="'cpu' devices have no known speed and memory"):
        resolved(job(auto), zerojax.mesh(), 300, Console())
