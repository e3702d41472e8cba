"""``zerojax.fit``: the settings predicted to train fastest, in place of a config's "auto"."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.config import ConfigError, load
from zerojax.config.auto import stand_in
from zerojax.config.load import as_json
from zerojax.devices.mesh import are_there, batch_devices
from zerojax.devices.mesh import mesh as all_devices
from zerojax.devices.rates import Rates
from zerojax.foresight.choice import Choice
from zerojax.foresight.devices import rates_here
from zerojax.foresight.guard import OutOfMemoryError
from zerojax.foresight.trials import Trial
from zerojax.models.registry import find, takes
from zerojax.tuning.cache import Cache
from zerojax.tuning.options import search_options
from zerojax.tuning.search import COMPILES, SECONDS, Searched, listed, search
from zerojax.tuning.space import left_open
from zerojax.tuning.study import Study
from zerojax.xla.compiler import GPUS


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The config of the fastest choice, and the choices it was taken from.

    Attributes:
      config: A DeepSpeed JSON for :func:`zerojax.zero`.
      choice: Its settings; ``remat`` is an option of the model, which no config has.
      ranking: Every choice that was compiled and fits, most tokens a second first (the shortest
        step first where ``autotuning.metric`` is "latency"). With ``xla``
        first the fastest under several options of XLA.
      unseen: Combinations of stage, remat and offload that the limits of the search left out.
      compiled: How many programs were compiled.
      remembered: How many programs the cache knew.
    """

    config: dict[str, Any]
    choice: Choice
    ranking: tuple[Trial, ...]
    unseen: tuple[Choice, ...]
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
    network: str | None = None,
    auto: Mapping[str, Any] | None = None,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    xla: bool = False,
    note: Callable[[str], None] | None = None,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> Fitted:
    """The settings that a config leaves open, chosen for the most predicted tokens a second.

    Open are the stage, the batch sizes, the offload sections and ``stage3_max_live_parameters``,
    where the config has "auto" or nothing, and ``remat`` where ``model`` takes that option. Every
    choice is compiled for the devices; none is run. ``~/.cache/zerojax`` remembers what was
    compiled before.

    DeepSpeed's section ``autotuning``, where enabled, bounds the search: the rows of an update
    and of a micro-batch, how many micro-batches are compiled, and by ``metric`` what is fastest.
    The config of the result is without it.

    Args:
      config: A DeepSpeed JSON as a path or a dict, or Accelerate's YAML.
      model: Returns a language model of flax, or a :class:`zerojax.Workload` for any other step;
        may take ``zero``, ``rows``, ``seq`` and ``remat``. Or a name, as ``"llama-7b"``.
      train_batch_size: Rows of an update, over all devices; None leaves the number open.
      seq: Tokens in a row.
      mesh: The devices, as for :func:`zerojax.zero`; :func:`zerojax.topology` for absent ones.
      rates: The speeds and the memory of the devices; None for the figures of their kind, with the
        memory that is free.
      network: The network between nodes, as ``"400gb"`` a device or ``"ib-ndr"``
        (:func:`zerojax.devices.network.network_speed`); None for that of ``rates``.
      auto: What stands in for an "auto" that is not open, as for :func:`zerojax.zero`.
      compiles: How many choices are compiled at the most.
      seconds: How long the search takes at the most, in seconds.
      xla: Whether the fastest choice is then compiled under several options of XLA
        (:mod:`zerojax.tuning.options`), and run under them where the devices are GPUs that exist.
        The config has the fastest options in its section "xla".
      note: Called with what is compiled next; None prints it on stderr.
      done: Called with how many modes (stage, remat, offload) are done, and how many there are.

    Raises:
      ConfigError: The config is wrong, or the rows do not divide among the devices.
      OutOfMemoryError: No choice that was compiled fits.
      ValueError: Nothing is known of such devices or of the network, the model is unknown or no
        language model, or ``xla`` is asked for devices that are no GPUs.

    Example::

      fitted = zerojax.fit("zero_auto.json", lambda: GPT(config), train_batch_size=64)
      zero = zerojax.zero(fitted.config)
    """
    if jax.process_count() > 1:  # each would end its search by its own clock
        raise ValueError("fit: give all processes one config: run `zerojax fit --out` before, once")
    raw, wrong = as_json(config, auto)
    if problems := wrong + stand_in(raw, auto or {}).problems:
        raise ConfigError(problems)
    function = find(model) if isinstance(model, str) else model
    mesh = all_devices() if mesh is None else mesh
    rates = (rates_here(mesh) if rates is None else rates).over(network)
    if xla and mesh.devices.flat[0].platform not in GPUS:
        raise ValueError(f"xla: its options are for GPUs, and the devices are {rates.kind}")
    until = time.monotonic() + seconds
    world = batch_devices(mesh)
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
        note=_tell if note is None else note,
        measured=cache,
    )
    searched = search(study, space, compiles, seconds, done)
    ranking = tuple(searched.ranking)
    if not ranking and study.failed is not None:
        raise study.failed
    if not ranking:
        raise OutOfMemoryError(_nothing(study, searched, f"{mesh.size} x {rates.kind}"))
    if xla:
        run = study.run if are_there(mesh) else None
        left = until - time.monotonic()
        ranking = (
            *search_options(study, ranking[0], fixed.get("xla") or (), left, run),
            *ranking[1:],
        )
    chosen = ranking[0].choice
    return Fitted(
        chosen.json(fixed, world), chosen, ranking, tuple(searched.unseen), cache.misses, cache.hits
    )


def _nothing(study: Study, searched: Searched, devices: str) -> str:
    """Why no choice is left, and what to do."""
    if searched.unseen:
        return (
            f"nothing that was compiled fits {devices}, and the limit of compiles or of seconds "
            f"came before these: {listed(searched.unseen)}. Raise the limit"
        )
    least = study.least(searched.leanest) / 1e9
    more = "" if searched.leanest.remat else ", or a model that takes `remat`"
    return (
        f"nothing fits {devices}: {searched.leanest} needs at least {least:.1f} of "
        f"{study.rates.room / 1e9:.1f} GB. Take more devices{more}"
    )


def _tell(text: str) -> None:
    print(f"zerojax: compiling {text}", file=sys.stderr)
