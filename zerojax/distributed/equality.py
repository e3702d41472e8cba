"""Comparison of a program or of values that must be equal in all processes."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from itertools import accumulate

import jax
import numpy as np

from zerojax.distributed.exchange import exchange
from zerojax.distributed.launched import LaunchError
from zerojax.distributed.roll_call import by_value, unequal
from zerojax.xla.types import PyTree

_PATIENCE = 600.0  # s
_SENT, _SHOWN = 10_000, 200
"""Characters of a line that processes send each other, and that a message shows."""


def require_same_program(name: str, programs: Iterable[jax.stages.Lowered]) -> None:
    """Refuses programs that differ between the processes, before they are compiled.

    A learning rate or a Python branch that depends on the process gives each process a different
    program, and the collectives of different programs would still pair up.

    Args:
      name: Name of the function, for messages.
      programs: The lowered programs of the function.

    Raises:
      LaunchError: Programs differ; raised in all processes, with the first line that differs.
    """
    lines = [line for program in programs for line in program.as_text().splitlines()]
    checksums = [*accumulate(lines, lambda s, line: zlib.crc32(line.encode(), s), initial=0)]
    what = f"the program of {name}"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len({*exchange(what, digest, _PATIENCE)}) == 1:
        return
    low, high = 0, min(exchange(what, len(lines), _PATIENCE))
    while low < high:  # the lines before low are equal
        middle = (low + high + 1) // 2
        is_same = len({*exchange(what, checksums[middle], _PATIENCE)}) == 1
        low, high = (middle, high) if is_same else (low, middle - 1)
    line = lines[low].strip() if low < len(lines) else "the end"
    received = where_they_differ(exchange(what, line[:_SENT], _PATIENCE))
    raise LaunchError(
        f"{name} is another program in each process: line {low + 1} "
        f"is\n{_lines(by_value(dict(enumerate(received))))}\nA learning rate, a constant, a random "
        "number of numpy or a branch of Python depends on the process: make it the same"
    )


def where_they_differ(lines: list[str]) -> list[str]:
    """Cuts long lines to the part in which they differ.

    Example:
      >>> where_they_differ(["x" * 500 + "1", "x" * 500 + "2"])[0][-5:]
      'xxxx1'
    """
    columns = enumerate(zip(*lines, strict=False))
    first = next((i for i, column in columns if len({*column}) > 1), min(map(len, lines)))
    start = max(0, first - _SHOWN // 4)
    return ["..." * (start > 0) + line[start : start + _SHOWN] for line in lines]


SAME_ARGUMENTS = (
    "Pass the same seeds, keys and rates in every process; only rows of a batch may differ"
)


def require_same_values(
    name: str, values: Mapping[str, object], remedy: str = SAME_ARGUMENTS
) -> None:
    """Refuses arrays and numbers that differ between the processes.

    Args:
      name: Name of the values' owner, for messages.
      values: Values by name; only numbers, texts, host arrays and fully addressable arrays are
        compared.
      remedy: The end of the message.

    Raises:
      LaunchError: Values differ; raised in all processes, with a name that differs.
    """
    received = exchange(f"the values of {name}", descriptions(values), _PATIENCE)
    if differing := unequal(dict(enumerate(received))):
        (first, groups), *more = differing.items()
        others = f"\nand {len(more)} more differ" if more else ""
        raise LaunchError(
            f"{name}: {first} differs between the processes:\n{_lines(groups)}{others}\n{remedy}"
        )


def descriptions(values: Mapping[str, object]) -> dict[str, str]:
    """Describes numbers, texts, host arrays and fully addressable arrays; equal ones are described
    equally."""
    return {key: _digest(x) for key, x in values.items() if _is_own(x)}


def are_computed(values: Iterable[object]) -> bool:
    """Returns whether the devices have computed all arrays among these values."""
    return all(_without_key(x).is_ready() for x in values if isinstance(x, jax.Array))


def _without_key(x: PyTree) -> PyTree:
    """Returns the numbers of random keys, and another array as it is."""
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _is_own(x: object) -> bool:
    if isinstance(x, jax.Array):
        return x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | int | float | complex | str)


def _digest(x: object) -> str:
    """Describes an array by its values or a checksum."""
    array = np.asarray(_without_key(x) if isinstance(x, jax.Array) else x)
    if array.size <= 4:
        return repr(array.tolist())
    checksum = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype}{[*array.shape]} of checksum {checksum:08x}"


def _lines(groups: Mapping[str, str]) -> str:
    """Lists each value once, with its processes."""
    return "\n".join(f"  {who}: {value}" for value, who in groups.items())
