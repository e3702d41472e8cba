"""The saved array for each wanted one, where the two trees may differ.

Four differences are bridged: a loss scale on one side alone (fp16 against fp32 or bf16), errors of
quantized gradients that the other side lacks or has of other devices, an optimizer state that
zerojax has not wrapped yet, and parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.saved import SavedArray
from zerojax.checkpoint.state_tree import Path, is_key
from zerojax.distributed import log
from zerojax.optim.wrap import ZeroOptState

INNER, LOSS_SCALE, ERROR = "inner", "loss_scale", "error"
FRESH = [name for name in ZeroOptState._fields if name != INNER]
SHOWN = 8


def match(
    wanted: Mapping[Path, Any],
    saved: Mapping[Path, SavedArray],
    optimizer: Path | None,
    *,
    where: str,
) -> dict[Path, Path | None]:
    """Finds each wanted array among the saved ones.

    Args:
      wanted: Shapes and dtypes by path.
      saved: The saved arrays by path.
      optimizer: The path of the optimizer's state; None where parameters alone are wanted, so that
        other arrays of the checkpoint are ignored.
      where: The checkpoint, for messages.

    Returns:
      The saved path of each wanted one; None for a new array: parts of ``ZeroOptState`` that a
      plain optimizer state lacks, a loss scale, errors that are not those of these devices, arrays
      without elements.

    Raises:
      CheckpointError: other arrays are missing, too many, or differ in shape or kind.
    """
    whole, optimizer = optimizer is not None, optimizer or ()
    n = len(optimizer)
    wrapped = any(path[: n + 1] == (*optimizer, "steps") for path in saved)
    fresh = [LOSS_SCALE] if wrapped else FRESH
    sources: dict[Path, Path | None] = {}
    problems = []
    for path, leaf in wanted.items():
        source, own = path, whole and path[:n] == optimizer
        if own and not wrapped and path[n] == INNER:
            source = (*optimizer, *path[n + 1 :])
        if own and path[n] == ERROR:
            fits = source in saved and not _mismatch(path, leaf, saved[source])
            sources[path] = source if fits else None
        elif source in saved:
            sources[path] = source
            problems += _mismatch(path, leaf, saved[source])
        elif whole and (0 in leaf.shape or (own and path[n] in fresh)):
            sources[path] = None
        else:
            problems.append(f"only in the state: {_told(path, leaf)}")
    used = set(sources.values())
    problems += [
        f"only in the checkpoint: {_told(path, leaf)}"
        for path, leaf in saved.items()
        if whole
        and path not in used
        and path[: n + 1] not in ((*optimizer, LOSS_SCALE), (*optimizer, ERROR))
    ]
    if problems:
        raise CheckpointError(_differences(where, problems))
    errors = [path for path in wanted if whole and path[: n + 1] == (*optimizer, ERROR)]
    if new := [path for path in errors if sources[path] is None]:
        log.warning(
            "%s: %d of %d errors of quantized gradients are missing or of other devices, and start "
            "from zero.", where, len(new), len(errors),
        )  # fmt: skip
    return sources


def _mismatch(path: Path, wanted: Any, saved: SavedArray) -> list[str]:
    if is_key(wanted):
        return []  # its data is what is on disk
    if tuple(wanted.shape) != saved.shape:
        return [f"{'.'.join(path)}: {list(saved.shape)} there, {list(wanted.shape)} here"]
    if not _of_a_kind(wanted.dtype, saved.dtype):
        return [f"{'.'.join(path)}: {saved.dtype} there, {wanted.dtype} here"]
    return []


def _of_a_kind(a: Any, b: Any) -> bool:
    """Whether both are floats or both whole numbers, of any widths (a step was a Python int)."""
    return a == b or any(
        jax.dtypes.issubdtype(a, kind) and jax.dtypes.issubdtype(b, kind)
        for kind in (np.floating, np.integer)
    )


def _told(path: Path, leaf: Any) -> str:
    return f"{'.'.join(path)} {list(leaf.shape)} {leaf.dtype}"


def _differences(where: str, problems: list[str]) -> str:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "\n  ".join([f"{where} holds another model or optimizer:", *problems[:SHOWN], *more]) + (
        "\nMake the state with the model and the optimizer that were saved; for parameters alone, "
        "restore(abstract_state.params)."
    )
