"""What a caller adds to a checkpoint: JSON, in which PRNG keys may stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.errors import CheckpointError

_KEY = "$key"


def encoded(value: Any, path: str = "extra") -> Any:
    """``value`` as JSON has it.

    Raises:
      CheckpointError: something that is neither JSON nor a PRNG key; with its path.

    Example:
      >>> decoded(encoded({"key": jax.random.key(7), "row": 3}))
      {'key': Array((), dtype=key<fry>) overlaying:
      [0 7], 'row': 3}
    """
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _KEY:
                raise CheckpointError(f"{path}: the key {key!r} is no string of JSON's own")
        return {key: encoded(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, jax.Array) and is_key(value):
        data = np.asarray(jax.random.key_data(value))
        return {_KEY: str(jax.random.key_impl(value)), "data": data.tolist()}
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        return value.item()
    raise CheckpointError(
        f"{path}: {type(value).__name__} is neither JSON nor a PRNG key; arrays belong in the state"
    )


def decoded(value: Any) -> Any:
    """The value again; tuples have become lists."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KEY in value:
        data = jnp.asarray(value["data"], jnp.uint32)
        return jax.random.wrap_key_data(data, impl=value[_KEY])
    return {key: decoded(item) for key, item in value.items()}


def is_key(x: Any) -> bool:
    """Whether an array, abstract or not, is of PRNG keys."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
