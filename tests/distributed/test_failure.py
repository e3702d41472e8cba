"""What a process leaves for its launcher."""

import resource
from pathlib import Path

import pytest

from zerojax.distributed.failure import leave


def test_a_full_disk_leaves_no_half_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROJAX_RUN_DIR", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        leave("error", 1, "x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]
    assert "cannot write error.1" in capsys.readouterr().err
    leave("error", 1, "x" * 200)
    assert (tmp_path / "error.1").read_text() == "x" * 200
