"""The monitors of --with_tracking."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import tracking
from examples.tracking import monitors


def test_where_figures_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert monitors(False, None, tmp_path) == {}
    with pytest.raises(ValueError, match="--report_to wandb needs --with_tracking"):
        monitors(False, "wandb", tmp_path)
    wandb = monitors(True, "wandb", tmp_path)
    assert [*wandb] == ["wandb"]
    assert wandb["wandb"].project == tmp_path.name
    installed = SimpleNamespace(find_spec=lambda name: name == "wandb" or None)
    monkeypatch.setattr(tracking.importlib, "util", installed)
    everywhere = monitors(True, None, tmp_path)
    assert [*everywhere] == ["csv_monitor", "wandb"]
    assert (everywhere["csv_monitor"].output_path, everywhere["csv_monitor"].job_name) == (
        str(tmp_path),
        "logs",
    )
