"""``zerojax.fit``: replaces a config's "auto" by the settings predicted to train fastest."""

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
from zerojax.config.batch import stages_of
from zerojax.config.load import as_json
from zerojax.devices.arranged import in_stages
from zerojax.devices.mesh import mesh as all_devices
from zerojax.devices.mesh import micro_batch_devices, stage_size
from zerojax.devices.rates import Rates
from zerojax.foresight.choice import Choice
from zerojax.foresight.devices import rates_here
from zerojax.foresight.guard import OutOfMemoryError
from zerojax.foresight.trials import Trial
from zerojax.models.registry import find, takes, takes_policy
from zerojax.tuning.cache import Cache
from zerojax.tuning.search import COMPILES, SECONDS, SearchResult, listed, search
from zerojax.tuning.space import FILLED, POLICIES, left_open
from zerojax.tuning.study import Study


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The config of the fastest choice, and the ranking of the choices.

    Attributes:
      config: A DeepSpeed JSON for :func:`zerojax.zero`.
      choice: The settings of ``config``, and two that no config has: ``remat``, an option of the
        model, a bool or a name for ``remat_policy``; and ``pipeline``, if above 1 the size of the
        mesh's outermost axis "stage".
      ranking: Every choice that was compiled and fits, by descending tokens per second (by
        ascending step time if ``autotuning.metric`` is "latency").
      unseen: Combinations of stage, remat and offload that the search skipped at its limits.
      compiled: The number of programs compiled.
      remembered: The number of programs found in the cache.
    """

    config: dict[str, object]
    choice: Choice
    ranking: tuple[Trial, ...]
    unseen: tuple[Choice, ...]
    compiled: int
    remembered: int


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: str | Callable[..., object],
    *,
    train_batch_size: int | None = None,
    seq: int = 1024,
    mesh: Mesh | None = None,
    rates: Rates | None = None,
    network: str | None = None,
    auto: Mapping[str, object] | None = None,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    note: Callable[[str], None] | None = None,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> Fitted:
    """Chooses the settings that a config leaves open for the most predicted tokens per second.

    The stage, the batch sizes, the offload sections and ``stage3_max_live_parameters`` are open if
    the config has "auto" or nothing for them, and ``remat`` and ``remat_policy`` are open if
    ``model`` takes them. If the mesh has only the axis "data", over several hosts, and the fastest
    choice waits for the network, it is tried in pipeline stages of hosts as well. The search
    compiles each choice for the devices and runs none. ``~/.cache/zerojax`` caches the measurements
    of compiled programs.

    DeepSpeed's section ``autotuning``, if enabled, bounds the search: the rows of an update and of
    a micro-batch, and the number of micro-batches compiled; its ``metric`` defines the fastest
    choice. The resulting config does not have this section.

    Args:
      config: A DeepSpeed JSON as a path or a dict, or Accelerate's YAML.
      model: A function that returns a flax language model, or a :class:`zerojax.Workload` for any
        other step; it may take ``zero``, ``rows``, ``seq``, ``remat`` and ``remat_policy``, a name
        for :func:`zerojax.remat_policy`. Or the name of a model, such as ``"llama-7b"``.
      train_batch_size: Rows of an update, over all devices; None leaves the number open.
      seq: Tokens in a row.
      mesh: The devices, as for :func:`zerojax.zero`; use :func:`zerojax.topology` for absent
        devices.
      rates: The speeds and the memory of the devices; None for the rates of their kind, with the
        memory that is free.
      network: The network between nodes, such as ``"400gb"`` (per device) or ``"ib-ndr"``
        (:func:`zerojax.devices.network.network_speed`); None for the network of ``rates``.
      auto: Values for each "auto" that is not open, as for :func:`zerojax.zero`.
      compiles: The maximum number of choices to compile.
      seconds: The maximum duration of the search, in seconds.
      note: A function called with the description of each choice before it is compiled; None to
        print on stderr.
      done: A function called with the number of modes (stage, remat, offload) that are done, and
        their total.

    Raises:
      ConfigError: The config is invalid, or the rows do not divide among the devices.
      OutOfMemoryError: No choice that was compiled fits.
      ValueError: The devices, the network or the model are unknown, the model is not a language
        model, or several processes call ``fit``.

    Example::

      fitted = zerojax.fit("zero_auto.json", lambda: GPT(config), train_batch_size=64)
      zero = zerojax.zero(fitted.config)
    """
    if jax.process_count() > 1:  # each would stop its search by its own clock
        raise ValueError("fit: run `zerojax fit --out FILE` once, and pass FILE in all processes")
    raw, read_problems = as_json(config, auto)
    if problems := read_problems + stand_in(raw, auto or {})[1]:
        raise ConfigError(problems)
    function = find(model) if isinstance(model, str) else model
    mesh = in_stages(all_devices() if mesh is None else mesh, stages_of(raw))
    rates = (rates_here(mesh) if rates is None else rates).over(network)
    world = micro_batch_devices(mesh)
    remats = (False, True) if takes(function, "remat") else (None,)
    space, fixed = left_open(raw, train_batch_size, world, remats)
    if takes_policy(function):
        space = dataclasses.replace(space, policies=POLICIES)
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
    if (stages := stage_size(mesh)) > 1:
        batches = dataclasses.replace(space.batches, fewest=FILLED * stages)
        space = dataclasses.replace(space, batches=batches)
    elif space.batches.bounds is None:
        space = dataclasses.replace(space, pipelines=study.pipelines)
    searched = search(study, space, compiles, seconds, done)
    ranking = tuple(searched.ranking)
    if not ranking:
        devices = f"{mesh.size} x {rates.kind}"
        raise study.failed or OutOfMemoryError(_nothing_fits(study, searched, devices))
    chosen = ranking[0].choice
    return Fitted(
        chosen.json(fixed, world), chosen, ranking, tuple(searched.unseen), cache.misses, cache.hits
    )


def _nothing_fits(study: Study, searched: SearchResult, devices: str) -> str:
    """Returns a message that explains why no choice fits, and what to do."""
    if searched.unseen:
        return (
            f"nothing that was compiled fits {devices}, and the limit of compiles or of "
            f"seconds was reached before these: {listed(searched.unseen)}. Raise the limit"
        )
    least_gb = study.least(searched.leanest) / 1e9
    hint = "" if searched.leanest.remat else ", or a model that takes `remat`"
    return (
        f"nothing fits {devices}: {searched.leanest} needs at least {least_gb:.1f} of "
        f"{study.rates.room / 1e9:.1f} GB. Take more devices{hint}"
    )


def _tell(text: str) -> None:
    print(f"zerojax: compiling {text}", file=sys.stderr)
