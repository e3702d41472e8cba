"""Storage of steps: a folder on a disk, or in a Google Cloud bucket, which has no renames."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Self

from etils import epath
from etils.epath.gpath import PosixGPath

from zerojax.checkpoint.errors import CheckpointError, reading

DELETED = ".deleted"
UNDER_WAY = ".orbax-checkpoint-tmp"
"""Suffix of a step's folder while the step is written to a disk; orbax uses the same."""

COMMITTED = "commit_success.txt"
"""The last file of a step in a bucket; a folder without it does not count as a step. Orbax uses
the same."""

RECORD = "zerojax.json"
"""The file that zerojax adds to a step."""

_STEP, _PADDED = re.compile(r"0|[1-9][0-9]*"), re.compile(r"0[0-9]+")


_REFUSED = {
    r"\\": "a backslash, which tensorstore takes for a slash",
    "\0": "a null character",
    "[\ud800-\udfff]": "bytes that are not UTF-8, which tensorstore refuses",
}


class _Folder(PosixGPath):
    """A path whose own characters are never read as a pattern.

    Orbax finds the files of the processes with :meth:`glob` of the path that it receives. etils
    interprets brackets in that path as a pattern too, so orbax would silently find nothing.
    """

    def glob(self, pattern: str) -> Iterator[Self]:
        if in_bucket(self):
            yield from super().glob(pattern)
        else:
            yield from (self / name for name in glob.iglob(pattern, root_dir=self))


def path_of(path: str | os.PathLike[str]) -> epath.Path:
    """Returns a path for etils, orbax and tensorstore.

    Raises:
      CheckpointError: One of these libraries would mistake the path for a different one.
    """
    text = os.fspath(path)
    if refused := [reason for character, reason in _REFUSED.items() if re.search(character, text)]:
        raise CheckpointError(f"directory: {text!r:.300} has {refused[0]}: choose another name")
    folder = _Folder(text)
    if text.startswith("/") and "://" in os.fspath(folder):
        raise CheckpointError(
            f"directory: etils reads {text} as the URL {folder}: rename the folder, or link to it"
        )
    return folder


def opened(directory: str | os.PathLike[str]) -> epath.Path:
    """Returns an absolute path, or the URL of a bucket.

    Raises:
      CheckpointError: The path is empty, or a URL that checkpoints cannot be written to.
    """
    path = os.fspath(directory)
    if not path:
        raise CheckpointError("directory is empty: name a folder, such as run/steps")
    # pathlib turns "gs://" into "gs:/".
    url = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", path)
    if not url:
        return path_of(os.path.abspath(os.path.expanduser(path)))
    rest = path[url.end() :]
    if url[1].lower() == "gs":
        return require_answer(path_of(f"gs://{rest}"))
    raise CheckpointError(
        f"directory: {path}: orbax writes to gs:// and to folders only. Pass a folder, say ./{rest}"
    )


def require_answer(path: epath.Path, seconds: float = 30.0) -> epath.Path:
    """Returns a path; one in a bucket answers within ``seconds``.

    Raises:
      CheckpointError: gcsfs is missing, or the bucket does not answer.
    """
    if not in_bucket(path):
        return path
    try:
        import fsspec
        import gcsfs  # noqa: F401
    except ImportError:
        raise CheckpointError(f"{path} needs gcsfs: pip install -e '.[bucket]'") from None
    # Tensorstore and other processes write to the bucket too, unseen by gcsfs.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False

    def ask() -> None:
        with contextlib.suppress(Exception):  # a refusal is reported where it is met
            path.exists()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        raise CheckpointError(
            f"directory: {path} does not answer within {seconds:g} s: check network and credentials"
        )
    return path


def in_bucket(path: epath.Path) -> bool:
    """Returns whether a path is in a bucket."""
    return os.fspath(path).startswith("gs://")


def number(name: str) -> int | None:
    """Returns the step that zerojax saves under a name; None if the name is not a step number.

    Example:
      >>> number("20"), number("020"), number("\N{ARABIC-INDIC DIGIT THREE}")
      (20, None, None)
    """
    return int(name) if _STEP.fullmatch(name) else None


def step_of(folder: epath.Path) -> int | None:
    """Returns the step that a folder holds; plain orbax, unlike zerojax, may zero-pad its name."""
    padded = _PADDED.fullmatch(folder.name) and not (folder / RECORD).exists()
    return int(folder.name) if padded else number(folder.name)


def exists(path: epath.Path) -> bool:
    """Returns whether a path exists.

    Raises:
      OSError: The operating system cannot tell, for example without permission.
    """
    if in_bucket(path):
        return path.exists()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def size(file: epath.Path) -> int:
    """Returns the size of a file in bytes.

    Raises:
      ValueError: The path is not a regular file.
      OSError: The operating system refuses access.
    """
    if in_bucket(file):
        return file.stat().length
    status = os.stat(file)
    _require_regular(file, status)
    return status.st_size


def read(file: epath.Path) -> bytes:
    """Reads a file.

    Raises:
      ValueError: The path is not a regular file; a reader of a FIFO would wait forever.
      OSError: The operating system refuses to read it.
    """
    if in_bucket(file):
        return file.read_bytes()
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _require_regular(file, os.fstat(handle))
        with open(handle, "rb", closefd=False) as content:
            return content.read()
    finally:
        os.close(handle)


def _require_regular(file: epath.Path, about: os.stat_result) -> None:
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(file))
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{file} is not a regular file")


def folders(directory: epath.PathLike) -> dict[int, epath.Path]:
    """Returns the folders of complete steps below ``directory``, by step, in order.

    Raises:
      CheckpointError: The operating system refuses to list the directory.
    """
    root = path_of(directory)
    numbered = _numbered(root)
    if in_bucket(root):
        numbered = {step: x for step, x in numbered.items() if (x / COMMITTED).exists()}
    return dict(sorted(numbered.items()))


def _numbered(root: epath.Path) -> dict[int, epath.Path]:
    with reading(root, (OSError,)):
        entries = [*root.iterdir()] if exists(root) and root.is_dir() else []
    entries.sort(key=lambda entry: -len(entry.name))  # the unpadded name comes last and wins
    steps = {step_of(entry): entry for entry in entries}
    return {step: entry for step, entry in steps.items() if step is not None}


def under_way(directory: epath.Path, step: int) -> epath.Path:
    """Returns the folder of a step that is being written."""
    return directory / (str(step) if in_bucket(directory) else f"{step}{UNDER_WAY}")


def complete(folder: epath.Path, step: int) -> None:
    """Turns a completely written folder into a step, atomically."""
    if in_bucket(folder):
        (folder / COMMITTED).write_text(f"step {step}")
    else:
        folder.rename(folder.parent / str(step))


def remove(directory: epath.Path, step: int) -> None:
    """Removes a step; on a disk, its files remain in ``.deleted`` until :func:`sweep`."""
    folder = directory / str(step)
    if in_bucket(directory):
        (folder / COMMITTED).unlink()
        discard(folder)
    else:  # the remains of an interrupted removal must not look like a step
        (directory / DELETED).mkdir(exist_ok=True)
        folder.rename(directory / DELETED / str(step))


def discard(folder: epath.Path, pauses: Sequence[float] = ()) -> None:
    """Removes the files of a folder that is not a step, as far as possible.

    Args:
      folder: The folder, which may be missing.
      pauses: Seconds to wait before each further attempt, while the folder still exists.
    """
    if not in_bucket(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for pause in pauses:
            if not folder.is_dir():
                return
            time.sleep(pause)
            shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.rmtree(missing_ok=True)


def discard_unfinished(directory: epath.Path) -> None:
    """Removes unfinished and deleted steps that killed runs left."""
    if in_bucket(directory):
        complete_steps = folders(directory)
        leftovers = [x for step, x in _numbered(directory).items() if step not in complete_steps]
    else:
        leftovers = [*directory.glob(f"*{UNDER_WAY}*"), directory / DELETED]
    for folder in leftovers:
        discard(folder)


def sweep(directory: epath.Path) -> None:
    """Deletes the files of removed steps."""
    if not in_bucket(directory):
        discard(directory / DELETED)


def kvstore(folder: epath.Path) -> dict[str, object]:
    """Returns tensorstore's key-value store spec of a folder; its path ends with a slash."""
    if in_bucket(folder):
        bucket, _, path = os.fspath(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    # With memory mapping, only the needed part of an uncompressed chunk is read.
    return {"driver": "file", "path": f"{folder}/", "file_io_mode": {"mode": "memmap"}}
