"""The record beside a saved state: its config, mesh, arrays and files, with their checksums.

    STEP/state/...          the state, in orbax's format
    STEP/zerojax.json       {"format": 1, "sha256": of the rest, "record": {...}}

The record is written before the step is committed, so that either both exist or neither does.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from etils import epath

from zerojax.checkpoint import steps_folder
from zerojax.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    cannot_be_read,
    reading,
)
from zerojax.checkpoint.state_tree import is_key

FORMAT = 1
FILE = steps_folder.RECORD
MARK = {"record": FILE}
"""Custom metadata in orbax's metadata of a state with a record; reveals the loss of the record."""

FULL_DIGEST_BYTES = 16 * 2**20
"""The largest file with a CRC-32; larger files hold arrays, which have checksums."""

Spec = list[str | list[str] | None]

EXTRA = "extra"
"""The folder within a step that holds each process's ``extra``, if the processes' differ."""

_KEY = "$key"

_MAX_DEPTH = 100
"""Maximum nesting depth of an ``extra``; JSON readers stop at 1,000 levels."""
_MAX_BITS = 10_000
"""Maximum bits of an integer in an ``extra``; Python reads 4,300 digits."""


class _Strict(pydantic.BaseModel):
    model_config: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(extra="forbid", frozen=True)


class LeafRecord(_Strict):
    """The record of an array.

    Attributes:
      spec: Its PartitionSpec at rest; None if unknown.
      checksum: See :func:`zerojax.checkpoint.checksum.checksum`.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    checksum: int


class FileRecord(_Strict):
    """The record of a file in the step's folder; ``crc32`` is None for a large file."""

    bytes: int
    crc32: int | None


class Record(_Strict):
    """The record of a saved step.

    Attributes:
      step: The number of updates done, as the caller counts them.
      saved: The time of the save, ISO 8601 in UTC.
      versions: The versions of zerojax, jax, flax, optax and orbax.
      form: The kind of state: a flax ``TrainState``, a tuple of ``nnx.Module``, ``nnx.Optimizer``
        and more, or another pytree.
      stage, compute_dtype, mesh, axis, devices, processes: Properties of the run that saved the
        step.
      config: The fields of that run's :class:`ZeroConfig`.
      leaves: The arrays, by orbax's name.
      frozen: The arrays that were left out, by orbax's name.
      files: The files in subfolders, by path within the step's folder. Files directly in the step's
        folder (the record, orbax's metadata) are written later.
      metrics, extra: The values that the caller passed.
    """

    step: int
    saved: str
    versions: dict[str, str]
    form: Literal["linen", "nnx", "pytree"]
    stage: int
    compute_dtype: str | None
    mesh: dict[str, int]
    axis: str
    devices: str
    processes: int
    config: dict[str, object]
    leaves: dict[str, LeafRecord]
    frozen: dict[str, LeafRecord] = {}
    files: dict[str, FileRecord]
    metrics: dict[str, float] | None
    extra: Any


def write(folder: epath.Path, record: Record) -> None:
    """Writes the record of the step in ``folder``."""
    # An older zerojax reads a record without frozen arrays.
    body = record.model_dump(exclude_defaults=True)
    content = {"format": FORMAT, "sha256": seal(FORMAT, body), "record": body}
    (folder / FILE).write_text(json.dumps(content))


def read(folder: epath.Path) -> Record | None:
    """Reads the record of the step in ``folder``; returns None if none exists (plain orbax).

    Raises:
      DamagedCheckpointError: the record differs from the one that was written.
      CheckpointError: a newer zerojax wrote the record, or the operating system refuses to read it.
    """
    file = folder / FILE
    with reading(file):
        try:
            text = steps_folder.read(file).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        content = json.loads(text)
        version, digest, body = content["format"], content["sha256"], content["record"]
        computed_digest = seal(version, body)
    if digest != computed_digest or type(version) is not int or version < 1:
        raise DamagedCheckpointError(f"{file} was changed after the save: its sha256 differs")
    if version > FORMAT:
        raise CheckpointError(
            f"{file} has format {version}, this zerojax reads up to {FORMAT}: update zerojax"
        )
    with reading(file):
        try:
            return Record.model_validate(body)
        except pydantic.ValidationError as error:
            first, *more = error.errors(include_url=False)
            location = ".".join(map(str, first["loc"]))[:200]
            others = f", and {len(more)} more are wrong" if more else ""
            what = f"{location}: {first['msg']:.200}{others}"
            raise DamagedCheckpointError(f"{file} cannot be read: {what}") from None


def files(folder: epath.Path, max_bytes: int = FULL_DIGEST_BYTES) -> dict[str, FileRecord]:
    """Returns every file in subfolders of ``folder``; files directly in it are written later.

    Args:
      folder: The step's folder.
      max_bytes: The maximum bytes of a file with a ``crc32``.
    """
    return {
        name: FileRecord(bytes=size, crc32=_crc32(folder / name) if size <= max_bytes else None)
        for name, size in sorted(sizes(folder))
        if "/" in name
    }


def find_changes(folder: epath.Path, record: Record) -> list[CheckpointError]:
    """Returns differences from the record: damage, and files that the system refuses to read.

    Args:
      folder: The step's folder.
      record: The step's record.
    """
    problems: list[CheckpointError] = []
    if steps_folder.number(folder.name) not in (None, record.step):
        problems.append(
            DamagedCheckpointError(
                f"{folder / FILE} is of step {record.step}: rename the folder to {record.step}"
            )
        )
    try:
        present = dict(sizes(folder))
    except OSError as error:
        return [*problems, cannot_be_read(folder, error)]
    except DamagedCheckpointError as error:
        return [*problems, error]
    for name, file in record.files.items():
        problem = ""
        if name not in present:
            problem = "is missing"
        elif present[name] != file.bytes:
            problem = f"has {present[name]:,} bytes instead of {file.bytes:,}"
        elif file.crc32 is not None:
            try:
                if _crc32(folder / name) != file.crc32:
                    problem = "was changed after the save: its CRC differs"
            except (OSError, ValueError) as error:
                problems.append(cannot_be_read(folder / name, error))
        if problem:
            problems.append(DamagedCheckpointError(f"{folder / name} {problem}"))
    return problems


def sizes(folder: epath.Path) -> Iterator[tuple[str, int]]:
    """Yields the path within ``folder`` and the bytes of every file below ``folder``.

    Raises:
      DamagedCheckpointError: A file is not a regular file.
      OSError: The operating system refuses to list a folder or to report a size.
    """
    for entry in folder.iterdir() if steps_folder.exists(folder) and folder.is_dir() else ():
        if entry.is_dir():
            yield from ((f"{entry.name}/{name}", size) for name, size in sizes(entry))
        else:
            try:
                size = steps_folder.size(entry)
            except ValueError as error:
                raise DamagedCheckpointError(str(error)) from None
            yield entry.name, size


def extra_file(folder: epath.Path, process: int) -> epath.Path:
    """Returns the file of a process's ``extra`` in a step's folder."""
    return folder / EXTRA / f"{process}.json"


def encode_json(value: object, path: str = "extra", level: int = 0) -> object:
    """Encodes ``value`` as JSON; PRNG keys become their data and implementation.

    Raises:
      CheckpointError: an item, named by its path, is neither JSON nor a PRNG key, or nested too
        deeply.

    Example:
      >>> decode_json(encode_json({"key": jax.random.key(7), "row": 3}))
      {'key': Array((), dtype=key<fry>) overlaying:
      [0 7], 'row': 3}
    """
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise CheckpointError(
            f"{path} has {value.bit_length():,} bits, and JSON at most {_MAX_BITS:,}: write hex(x)"
        )
    if isinstance(value, bool | int | float | str | None):
        return value
    if level > _MAX_DEPTH:
        raise CheckpointError(f"{path:.60}... is nested more than {_MAX_DEPTH} levels: flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _KEY:
                raise CheckpointError(f"{path}: the key {key!r} cannot be stored: rename it")
        return {
            key: encode_json(item, f"{path}[{key!r}]", level + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [encode_json(item, f"{path}[{i}]", level + 1) for i, item in enumerate(value)]
    if isinstance(value, jax.Array) and is_key(value):
        data = np.asarray(jax.random.key_data(value))
        return {_KEY: str(jax.random.key_impl(value)), "data": data.tolist()}
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        return encode_json(value.item(), path, level + 1)
    raise CheckpointError(
        f"{path}: {type(value).__name__} is neither JSON nor a PRNG key: write x.tolist()"
    )


def decode_json(value: object) -> object:
    """Returns the value that :func:`encode_json` encoded, with lists in place of tuples."""
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KEY in value:
        data = jnp.asarray(value["data"], jnp.uint32)
        return jax.random.wrap_key_data(data, impl=value[_KEY])
    return {key: decode_json(item) for key, item in value.items()}


def _crc32(file: epath.Path) -> int:
    return zlib.crc32(steps_folder.read(file))


def seal(version: object, body: object) -> str:
    """Returns the digest of a record and its format, SHA-256 in hexadecimal."""
    text = json.dumps([version, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
