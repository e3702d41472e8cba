"""Lookup of models by name and by import path.

Names are entry points of the group ``zerojax.models``, so that any package can add models::

    [project.entry-points."zerojax.models"]
    my-model = "my_package.models:my_model"

A function may have any of the parameters ``zero`` (the :class:`zerojax.Zero` it is planned for),
``rows`` and ``seq`` (of the batch), ``remat`` (bool: save only a block's input), ``remat_policy``
(beside ``remat``: a name for ``zerojax.remat_policy``, what a block saves in addition; None for
nothing), ``scan`` (bool, with a default: False turns each block into a separate module, to be
counted), and ``attention`` (the name of an implementation, with a default, for ``--attention``).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping

GROUP = "zerojax.models"

Builder = Callable[..., object]
"""A function that returns a flax model or a :class:`zerojax.Workload`."""


class ModelError(ValueError):
    """A model is unknown, cannot be imported or called, or is not a language model."""


def find(name: str) -> Builder:
    """Returns the function of a model, by the model's name or as ``module:function``.

    Raises:
      ModelError: The name is unknown, or the import fails; the cause is the module's error.
    """
    if ":" in name:
        return _imported(name, *name.split(":", 1))
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if name not in entries:
        matches = difflib.get_close_matches(name, entries, n=1)
        hint = f" Did you mean {matches[0]!r}?" if matches else ""
        raise ModelError(
            f"unknown model {name!r}.{hint} Known: {', '.join(sorted(entries)) or 'none'}; or pass "
            "module:function for your own flax model"
        )
    return _imported(name, entries[name].module, entries[name].attr)


def _imported(name: str, module: str, function: str) -> Builder:
    try:
        found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except Exception as error:  # any error is possible: the module's code runs
        raise ModelError(
            f"model {name!r}: {type(error).__name__}: {error} (in PYTHONPATH and the current "
            "folder)"
        ) from error
    if not callable(found):
        raise ModelError(f"model {name!r}: {type(found).__name__} is no function")
    return found


def bound(function: Builder, options: Mapping[str, object]) -> Builder:
    """Binds to ``function`` those options that it takes.

    Raises:
      ModelError: The function requires another argument.
    """
    parameters = inspect.signature(function).parameters
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in options
    ]
    if missing:
        raise ModelError(
            f"{getattr(function, '__name__', 'the function')} requires {', '.join(missing)}: take "
            f"only {', '.join(options)}, or give the others defaults"
        )
    return functools.partial(function, **{k: v for k, v in options.items() if k in parameters})


def takes(function: Builder, option: str) -> bool:
    """Returns whether a function has an option of that name."""
    return option in inspect.signature(function).parameters


def takes_policy(function: Builder) -> bool:
    """Returns whether a function takes the name of a policy of what blocks with ``remat`` keep."""
    return takes(function, "remat") and takes(function, "remat_policy")
