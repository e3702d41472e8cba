"""What a process leaves for its launcher."""

from pathlib import Path

import pytest

from zerojax.distributed.failure import leave


def test_a_full_disk_leaves_no_half_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROJAX_RUN_DIR", str(tmp_path))
    (tmp_path / "error.1").symlink_to("/dev/full")
    for index in (1, 2):
        leave("error", index, "x" * 200)
    assert "cannot write error.1: [Errno 28]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["error.2"]
    assert (tmp_path / "error.2").read_text() == "x" * 200
