"""Where steps lie: a folder on a disk, or in a bucket of Google Cloud, which has no renames."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from zerojax.checkpoint.errors import CheckpointError

DELETED = ".deleted"
UNDER_WAY = ".orbax-checkpoint-tmp"
"""How the name of a step's folder ends while it is written on a disk; orbax's own."""

WHOLE = "commit_success.txt"
"""The last file of a step in a bucket, without which nothing takes the folder for a step; orbax's
own."""

_STEP = re.compile(r"\d+")


def opened(directory: str | os.PathLike[str]) -> epath.Path:
    """An absolute path, or the URL of a bucket.

    Raises:
      CheckpointError: The path is empty, or a URL that checkpoints cannot be written to.
    """
    path = os.fspath(directory)
    if not path:
        raise CheckpointError("directory: the empty path names no folder")
    # pathlib makes "gs:/" of "gs://".
    url = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", path)
    if not url:
        return epath.Path(path).expanduser().absolute()
    scheme, rest = url[1].lower(), path[url.end() :]
    if scheme == "gs":
        return _google(epath.Path(f"gs://{rest}"))
    instead = f"a mounted folder: {_MOUNTS.get(scheme, 'mount the store as a file system')}"
    if scheme == "file":
        instead = f"the path alone: /{rest}"
    raise CheckpointError(
        f"directory: {path} is a URL ({scheme}://); orbax writes to folders and to gs:// alone. "
        f"Give a local folder, or {instead}. (A folder of that name is ./{path}.)"
    )


_MOUNTS = {
    "s3": "FSx for Lustre links to a bucket of S3; mount-s3 cannot rename folders",
    "az": "blobfuse2 mounts a container of Azure",
}


def _google(path: epath.Path) -> epath.Path:
    try:
        import fsspec
        import gcsfs  # noqa: F401
    except ImportError:
        raise CheckpointError(
            f"directory: {path} is a bucket, which gcsfs lists: pip install -e '.[bucket]'; or "
            "mount the bucket with gcsfuse and give that folder"
        ) from None
    # Tensorstore and other processes write there too, unseen by gcsfs.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return path


def in_bucket(path: epath.Path) -> bool:
    """Whether a path is a bucket's."""
    return os.fspath(path).startswith("gs://")


def folders(directory: epath.PathLike) -> dict[int, epath.Path]:
    """The folders of complete steps below ``directory``, by step, in order."""
    root = epath.Path(directory)
    numbered = _numbered(root)
    if in_bucket(root):
        numbered = {step: x for step, x in numbered.items() if (x / WHOLE).exists()}
    return dict(sorted(numbered.items()))


def _numbered(root: epath.Path) -> dict[int, epath.Path]:
    entries = root.iterdir() if root.is_dir() else ()
    return {int(entry.name): entry for entry in entries if _STEP.fullmatch(entry.name)}


def under_way(directory: epath.Path, step: int) -> epath.Path:
    """The folder of a step that is being written."""
    return directory / (str(step) if in_bucket(directory) else f"{step}{UNDER_WAY}")


def complete(folder: epath.Path, step: int) -> None:
    """Makes a folder that is written a step, all at once."""
    if in_bucket(folder):
        (folder / WHOLE).write_text(f"step {step}")
    else:
        folder.rename(folder.parent / str(step))


def remove(directory: epath.Path, step: int) -> None:
    """Removes a step; on a disk its files stay in ``.deleted`` until :func:`sweep`."""
    folder = directory / str(step)
    if in_bucket(directory):
        (folder / WHOLE).unlink()
        discard(folder)
    else:  # a removal that is interrupted must not look like a step
        (directory / DELETED).mkdir(exist_ok=True)
        folder.rename(directory / DELETED / str(step))


def discard(folder: epath.Path, pauses: Sequence[float] = ()) -> None:
    """Removes the files of a folder that is not a step, as far as possible.

    Args:
      folder: May be missing.
      pauses: Seconds before each further attempt, where the folder is still there.
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
    """Removes what killed runs left."""
    if in_bucket(directory):
        whole = folders(directory)
        left = [x for step, x in _numbered(directory).items() if step not in whole]
    else:
        left = [*directory.glob(f"*{UNDER_WAY}*"), directory / DELETED]
    for folder in left:
        discard(folder)


def sweep(directory: epath.Path) -> None:
    """Removes the files of removed steps."""
    if not in_bucket(directory):
        discard(directory / DELETED)


def kvstore(folder: epath.Path) -> dict[str, Any]:
    """Tensorstore's key-value store of a folder, its path ending with a slash."""
    if in_bucket(folder):
        bucket, _, path = os.fspath(folder).removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}
    # Of an uncompressed chunk that is mapped into memory, only the part that is needed is read.
    return {"driver": "file", "path": f"{folder}/", "file_io_mode": {"mode": "memmap"}}
