"""CSV files as DeepSpeed lays them out."""

import errno
from pathlib import Path

import pytest

from zerojax.monitor.csv_files import CsvFiles


def test_layout(tmp_path):
    writer = CsvFiles(str(tmp_path / "run" / "job"))
    writer.write(
        [("Train/Samples/lr", 0.001, 8), ("a b,c", -1.5, 8), ("Train/Samples/lr", 1e-9, 16)]
    )
    writer.close()
    files = {path.name: path.read_bytes() for path in (tmp_path / "run" / "job").iterdir()}
    assert files == {
        "Train_Samples_lr.csv": b"step,lr\r\n8,0.001\r\n16,1e-09\r\n",
        "a_b,c.csv": b'step,"a b,c"\r\n8,-1.5\r\n',
    }


def test_a_file_that_is_there_is_continued_without_a_second_header(tmp_path):
    for samples, value in ((8, 1.0), (16, float("nan"))):
        CsvFiles(str(tmp_path)).write([("loss", value, samples)])
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\r\n8,1.0\r\n16,nan\r\n"


def test_one_bad_file_does_not_keep_the_others_from_their_rows(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        CsvFiles(str(tmp_path)).write([("a", 1.0, 8), ("b", 2.0, 8)])
    assert error.value.filename == str(tmp_path / "a.csv")
    assert (tmp_path / "b.csv").read_text().splitlines() == ["step,b", "8,2.0"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_said_with_the_file(tmp_path):
    (tmp_path / "a.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        CsvFiles(str(tmp_path)).write([("a", 1.0, 8)])
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "a.csv"))


def test_half_a_row_is_taken_back(tmp_path, monkeypatch):
    import builtins

    writer = CsvFiles(str(tmp_path))
    writer.write([("a", 1.0, 8)])
    real = builtins.open

    def open_short(*args, **kwargs):
        file = real(*args, **kwargs)

        class Short:
            tell, truncate = file.tell, file.truncate
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda self, *_: file.close()  # noqa: E731
            write = staticmethod(lambda data: file.write(data[:3]))

        return Short()

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", open_short)
        with pytest.raises(OSError, match="No space left"):
            writer.write([("a", 2.0, 16)])
    writer.write([("a", 3.0, 24)])
    assert (tmp_path / "a.csv").read_text().splitlines() == ["step,a", "8,1.0", "24,3.0"]
