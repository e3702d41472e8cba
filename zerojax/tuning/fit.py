"""The settings that train fastest, by prediction, put where a config has "auto"."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ConfigError, load
from zerojax.config.auto import stand_in
from zerojax.config.json_file import plain, read_file, repeated
from zerojax.devices.mesh import mesh as all_devices
from zerojax.devices.mesh import shard_axis
from zerojax.devices.rates import Rates
from zerojax.foresight.choice import SECTIONS, Choice
from zerojax.foresight.devices import rates_here
from zerojax.foresight.guard import OutOfMemoryError
from zerojax.foresight.trials import Trial
from zerojax.models.registry import find, takes
from zerojax.tuning.cache import Cache
from zerojax.tuning.search import COMPILES, SECONDS, search
from zerojax.tuning.space import left_open
from zerojax.tuning.study import Study


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A config without "auto" where there was a choice, and what it was chosen from.

    Attributes:
      config: a DeepSpeed JSON, for :func:`zerojax.zero`.
      choice: its settings; ``remat`` is an option of the model, which no config has.
      ranking: all that was compiled and fits, most tokens a second first.
      compiled, remembered: programs.
    """

    config: dict[str, Any]
    choice: Choice
    ranking: tuple[Trial, ...]
    compiled: int
    remembered: int


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: str | Callable[..., Any],
    *,
    train_batch_size: int | None = None,
    seq: int = 1024,
    mesh: Mesh | None = None,
    rates: Rates | None = None,
    auto: Mapping[str, Any] | None = None,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    note: Callable[[str], None] | None = None,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> Fitted:
    """Choose what a config leaves open, for the most predicted tokens a second that fit.

    Open are the stage, the batch sizes and the offload sections, where the config has "auto" or
    nothing, and ``remat`` where ``model`` takes it. Every choice is compiled for the devices, and
    nothing is run. What was compiled before is remembered in ``~/.cache/zerojax``.

    Args:
      config: a DeepSpeed JSON as a path or a dict.
      model: returns a flax model that predicts the next token, or a :class:`zerojax.Workload`.
        It may take ``zero``, ``rows``, ``seq`` and ``remat``. Or a name, as ``"llama-7b"``.
      train_batch_size: rows of an update, over all devices; None leaves it open too.
      seq: tokens in a row.
      mesh: the devices, as for :func:`zerojax.zero`; :func:`zerojax.topology` for others.
      rates: how fast they are; by default the figures of their kind, and the memory that is free.
      auto: what stands in for an "auto" that is not open, as for :func:`zerojax.zero`.
      compiles, seconds: where the search ends, with the best that it has found.
      note: told what is compiled next; by default stderr is.
      done: told how many modes (stage, remat, offload) have been looked at, of how many.

    Raises:
      ConfigError: the config is wrong, or the rows do not divide among the devices.
      OutOfMemoryError: nothing that was compiled fits.
      ValueError: nothing is known of such devices.

    Example::

      fitted = zerojax.fit("zero_auto.json", lambda: GPT(config), train_batch_size=64)
      zero = zerojax.zero(fitted.config)
    """
    if jax.process_count() > 1:  # each would search by its own clock
        raise ValueError(
            "fit: give all processes one config: run `python -m zerojax fit --out` before, once"
        )
    raw = read_file(config) if isinstance(config, str | os.PathLike) else config
    if not isinstance(raw, Mapping):
        load(config)  # says what is wrong with it
    twice, raw = repeated(raw), plain(raw)
    if problems := twice + stand_in(raw, auto or {})[1]:
        raise ConfigError(problems)
    function = find(model) if isinstance(model, str) else model
    mesh = all_devices() if mesh is None else mesh
    rates = rates_here(mesh) if rates is None else rates
    world = mesh.shape[shard_axis(mesh)]
    remats = (False, True) if takes(function, "remat") else (None,)
    space, fixed = left_open(raw, train_batch_size, world, remats)
    cache = Cache()
    study = Study(
        function,
        load(space.furthest(fixed, world)),
        mesh,
        rates,
        rows=train_batch_size,
        seq=seq,
        note=_told if note is None else note,
        measured=cache,
    )
    ranking = tuple(search(study, space, compiles, seconds, done))
    if not ranking and study.failed is not None:
        raise study.failed
    if not ranking:
        raise OutOfMemoryError(
            f"nothing fits {mesh.size} x {rates.kind}: take more devices, or a model whose blocks "
            "are rematerialised (one that takes `remat`)"
        )
    chosen = ranking[0].choice
    return Fitted(chosen.json(fixed, world), chosen, ranking, cache.misses, cache.hits)


def undecided(config: Mapping[str, Any]) -> bool:
    """Whether a config has an "auto" that only :func:`fit` resolves: the stage's, or that of a
    whole offload section.

    Example:
      >>> undecided({"zero_optimization": {"stage": "auto"}})
      True
      >>> undecided({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"})
      False
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return False
    return "auto" in [zero.get(name) for name in ("stage", *SECTIONS)]


def _told(text: str) -> None:
    print(f"zerojax: compiling {text}", file=sys.stderr)
