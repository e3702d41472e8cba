"""The table of ``flops_profiler``: FLOPs, parameters and time of a step by module.

The names of the parameters define the modules; flax linen also writes module names into the names
of operations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zerojax.config.profiling import FlopsProfilerConfig
from zerojax.hlo.origins import OriginWork
from zerojax.plan.leaf import Leaf
from zerojax.plan.table import columns

_STEP_OF_PATH = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_INNERMOST = re.compile(r"[^()]*(?=\)*$)")
_ELSEWHERE, _UPDATE = "(forward and backward outside of them)", "(update and the rest)"
_OUTSIDE = (_ELSEWHERE, _UPDATE)


class ModuleEntry(NamedTuple):
    """A module of a tree, with its path ("" for the root) and its depth."""

    path: str
    depth: int
    module: Module


@dataclasses.dataclass
class Module:
    """One module, with its submodules.

    Attributes:
      parameters: The number of elements of its parameters, unsharded.
      work: The work of each device in a step.
      inside: The submodules, by name.
    """

    parameters: int = 0
    work: OriginWork = dataclasses.field(default_factory=OriginWork)
    inside: dict[str, Module] = dataclasses.field(default_factory=dict)

    def below(self, path: str = "", depth: int = 0) -> Iterator[ModuleEntry]:
        """Yields this module and all of its submodules, depth first."""
        yield ModuleEntry(path, depth, self)
        for name, module in self.inside.items():
            yield from module.below(f"{path}/{name}" if path else name, depth + 1)


def modules(leaves: Sequence[Leaf]) -> Module:
    """Builds the tree of modules that have parameters, without work.

    Args:
      leaves: The parameters of a plan.
    """
    root = Module()
    for leaf in leaves:
        *names, _ = ["".join(found) for found in _STEP_OF_PATH.findall(leaf.path)] or [""]
        module = root
        module.parameters += (elements := math.prod(leaf.shape))
        for name in names:
            module = module.inside.setdefault(name, Module())
            module.parameters += elements
    return root


def attributed(root: Module, work: Mapping[str, OriginWork], times: int = 1) -> None:
    """Adds the work of a program to the modules that its operations' names contain.

    Args:
      root: The tree; gets up to two more entries, for work outside of all modules.
      work: The work by ``op_name``.
      times: Runs of the program in a step.
    """
    for op_name, origin_work in work.items():
        root.work.add(origin_work, times)
        module = root
        for token in op_name.split("/")[:-1]:
            # transpose(jvp(GPT)) is GPT; wte.attend is the method of a module.
            name = _INNERMOST.search(token)[0].partition(".")[0]  # type: ignore[index]
            if name in module.inside:
                module = module.inside[name]
                module.work.add(origin_work, times)
        if module is root:
            name = _ELSEWHERE if "jvp(" in op_name else _UPDATE
            root.inside.setdefault(name, Module()).work.add(origin_work, times)


def table(
    root: Module, config: FlopsProfilerConfig, seconds: float, forecast: str, waited: float
) -> str:
    """Formats the profile of a step.

    Args:
      root: The modules, with their work.
      config: The selection of modules to list.
      seconds: The measured time of the step.
      forecast: The device kind of the forecast times of modules; "" if there are no times.
      waited: Seconds of the forecast in which a step waits for collectives and copies.
    """
    work, total_seconds = root.work, root.work.seconds + waited
    lines = [
        f"flops_profiler: step {config.profile_step}, of each device",
        f"parameters {_count(root.parameters)}; matrix products {_flops(work.flops)}, "
        f"{_flops(work.forward)} of them in the forward pass",
        f"measured: {1e3 * seconds:.3g} ms, {_flops(work.flops / seconds)} a second",
        f"forecast for {forecast}: {1e3 * total_seconds:.3g} ms, "
        f"{waited / (total_seconds or 1):.1%} of it waiting for collectives and copies"
        if forecast
        else "no time by module: the forecast knows no such devices",
    ]
    if not any(module.work.flops for name, module in root.inside.items() if name not in _OUTSIDE):
        lines.append(
            "no operation has the name of a module: flax linen writes names, in NNX "
            "jax.named_scope(...) in a __call__ does"
        )
    max_depth = math.inf if config.module_depth < 0 else config.module_depth
    listed = [each for each in root.below() if each.depth <= max_depth]
    if config.top_modules:
        lines += _largest([each for each in listed if each.path not in _OUTSIDE], config)
    if config.detailed:
        lines += _tree(listed, work.flops, total_seconds if forecast else None)
    return "\n".join(lines)


def _largest(listed: Sequence[ModuleEntry], config: FlopsProfilerConfig) -> Iterator[str]:
    """Yields a line for each depth, with its modules of most FLOPs."""
    for depth in sorted({each.depth for each in listed}):
        at_depth = [each for each in listed if each.depth == depth]
        largest = sorted(at_depth, key=lambda each: -each.module.work.flops)[: config.top_modules]
        entries = (f"{each.path or 'all'} {_flops(each.module.work.flops)}" for each in largest)
        yield f"depth {depth}: {', '.join(entries)}"


def _tree(listed: Sequence[ModuleEntry], flops: int, seconds: float | None) -> list[str]:
    """Returns a line for each module, indented, with its shares; ``seconds`` is None if unknown."""
    has_times = seconds is not None
    rows = [("module", "parameters", "FLOPs", "of FLOPs", *["of time"] * has_times)]
    for path, depth, module in listed:
        time_share = [f"{module.work.seconds / (seconds or 1):.1%}"] * has_times
        rows.append(
            (
                "  " * depth + (path.rpartition("/")[2] or "all"),
                _count(module.parameters),
                _count(module.work.flops),
                f"{module.work.flops / (flops or 1):.1%}",
                *time_share,
            )
        )
    return columns(rows, right=range(1, len(rows[0])))


def _flops(n: float) -> str:
    return f"{_count(n)} FLOPs" if n < 1000 else f"{_count(n)}FLOPs"


def _count(n: float) -> str:
    """Formats a number with a unit prefix, in powers of 1000.

    Example:
      >>> _count(35_104), _count(6.7e9), _count(12)
      ('35.1 K', '6.7 G', '12')
    """
    for unit in ("", "K", "M", "G", "T"):
        if n < 1000 or unit == "T":
            break
        n /= 1000
    return f"{n:.3g} {unit}".rstrip()
