"""Matching of the arrays of a target state to saved arrays, although the two trees may differ.

Three differences are allowed: a loss scale on only one side (fp16 against fp32 or bf16), an
optimizer state that zerojax has not wrapped yet, and a target of only parameters. The width of a
float or an integer may differ too.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.saved import SavedArray
from zerojax.checkpoint.state_tree import Path, is_key
from zerojax.optim.wrap import ZeroOptState
from zerojax.xla.types import Shaped

INNER, LOSS_SCALE = "inner", "loss_scale"
FRESH = [name for name in ZeroOptState._fields if name != INNER]
SHOWN = 2
"""Differences of a kind that a message lists."""


def match(
    wanted: Mapping[Path, Shaped],
    saved: Mapping[Path, SavedArray],
    numbers: Sequence[Path] | None,
    *,
    where: str,
) -> dict[Path, Path | None]:
    """Finds the saved array for each target array.

    Args:
      wanted: Shapes and dtypes of the target arrays by path.
      saved: The saved arrays by path.
      numbers: The paths of zerojax's numbers in the target state; None if the target is
        parameters, so that other arrays of the checkpoint are ignored.
      where: The checkpoint, for messages.

    Returns:
      The saved path for each target path; None for a new array: fields of ``ZeroOptState`` that a
      plain optimizer state lacks, a loss scale, arrays without elements.

    Raises:
      CheckpointError: other arrays are missing, surplus, or differ in shape or kind.
    """
    new = {
        (*path, field)
        for path in numbers or ()
        for field in ([LOSS_SCALE] if (*path, "steps") in saved else FRESH)
    }
    scales = {(*path, LOSS_SCALE) for path in numbers or ()}
    is_full_state = numbers is not None
    sources: dict[Path, Path | None] = {}
    problems = []
    for path, leaf in wanted.items():
        if path in saved:
            sources[path] = path
            problems += _mismatch(path, leaf, saved[path])
        elif is_full_state and (0 in leaf.shape or _is_below(path, new)):
            sources[path] = None
        else:
            problems.append(f"only in the state: {_described(path, leaf)}")
    used = set(sources.values())
    problems += [
        f"only in the checkpoint: {_described(path, leaf)}"
        for path, leaf in saved.items()
        if is_full_state and path not in used and not _is_below(path, scales)
    ]
    if problems:
        raise CheckpointError(_differences(where, problems))
    return sources


def _is_below(path: Path, parents: Collection[Path]) -> bool:
    return any(path[: len(parent)] == parent for parent in parents)


def _mismatch(path: Path, wanted: Shaped, saved: SavedArray) -> list[str]:
    if is_key(wanted):
        return []  # the disk holds the key's data
    if tuple(wanted.shape) != saved.shape:
        return [
            f"{'.'.join(path)}: saved as {list(saved.shape)}, the state has {list(wanted.shape)}"
        ]
    if not _same_kind(wanted.dtype, saved.dtype):
        return [f"{'.'.join(path)}: saved as {saved.dtype}, the state has {wanted.dtype}"]
    return []


def _same_kind(a: np.dtype, b: np.dtype) -> bool:
    """Returns whether both dtypes are floats or both integers of any width, or they are equal.

    The width may differ because a step counter may have been a Python int.
    """
    return a == b or any(
        jax.dtypes.issubdtype(a, kind) and jax.dtypes.issubdtype(b, kind)
        for kind in (np.floating, np.integer)
    )


def _described(path: Path, leaf: Shaped) -> str:
    return f"{'.'.join(path)} {list(leaf.shape)} {leaf.dtype}"


def _differences(where: str, problems: list[str]) -> str:
    def kind(problem: str) -> str:
        return problem.partition(":")[0] if problem.startswith("only") else ""

    kinds = itertools.groupby(sorted(problems, key=kind), kind)
    shown = [problem for _, group in kinds for problem in itertools.islice(group, SHOWN)]
    more = [f"and {len(problems) - len(shown)} more"] * (len(problems) > len(shown))
    return "\n  ".join([f"{where} holds another model or optimizer:", *shown, *more]) + (
        "\nCreate the state with the model and the optimizer that were saved; for only the "
        "parameters, restore(abstract_state.params)."
    )
