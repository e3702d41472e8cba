"""What the main job makes of "auto" in its config."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
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


def test_what_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(zerojax.ConfigError, match="object"):
        resolved(job(tmp_path / "list.json"), zerojax.mesh(), 300, Console())


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 32),
        ({"gradient_accumulation_steps": 4}, 32),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 16),
    ],
)
def test_the_rows_are_those_without_auto(
    auto: Path, keys: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def fit(config: Path, model: Any, **options: Any) -> Any:
        asked.update(options)
        return SimpleNamespace(config={"zero_optimization": {"stage": 1}}, choice="stage 1")

    monkeypatch.setattr(zerojax, "fit", fit)
    auto.write_text(json.dumps(json.loads(auto.read_text()) | keys))
    resolved(job(auto), zerojax.mesh(), 300, Console())
    assert asked["train_batch_size"] == rows


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_auto_is_chosen_by_compiles(
    auto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    accumulation = {"gradient_accumulation_steps": 1}  # leaves one compile for each stage
    auto.write_text(json.dumps(json.loads(auto.read_text()) | accumulation))
    console = Console(file=io.StringIO(), width=200)
    chosen = resolved(job(auto), zerojax.topology("h100", 8), 300, console)
    assert chosen.config.batch(8).train == 16  # the job's own rows
    assert "the fastest that fits: stage" in console.file.getvalue()  # type: ignore[attr-defined]
