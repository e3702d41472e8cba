"""The table of ``flops_profiler``: FLOPs, parameters and time of a step by module.

Modules are those of the parameters' names; flax linen writes them into the operations' names, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from zerojax.config.profiling import FlopsProfilerConfig
from zerojax.hlo.origins import OriginWork
from zerojax.plan.leaf import Leaf
from zerojax.plan.table import columns

_STEP_OF_PATH = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_INNERMOST = re.compile(r"[^()]*(?=\)*$)")
_ELSEWHERE, _UPDATE = "(forward and backward, outside of these)", "(update and the rest)"


@dataclasses.dataclass
class Module:
    """One module, with all that is in it.

    Attributes:
      parameters: Their elements, whole.
      work: Of each device in a step.
      inside: The modules in it, by name.
    """

    parameters: int = 0
    work: OriginWork = dataclasses.field(default_factory=OriginWork)
    inside: dict[str, Module] = dataclasses.field(default_factory=dict)

    def below(self, name: str = "", depth: int = 0) -> Iterator[tuple[str, int, Module]]:
        """This module and all in it, as (path, depth, module)."""
        yield name, depth, self
        for inner, module in self.inside.items():
            yield from module.below(f"{name}/{inner}" if name else inner, depth + 1)


def modules(leaves: Sequence[Leaf]) -> Module:
    """The tree of modules that have parameters, without work.

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
    """Adds the work of a program to the modules in whose names it stands.

    Args:
      root: The tree, with two entries more for what is in no module.
      work: The work by ``op_name``.
      times: Runs of the program in a step.
    """
    for op_name, one in work.items():
        root.work.add(one, times)
        module = root
        for token in op_name.split("/")[:-1]:
            # transpose(jvp(GPT)) is GPT; wte.attend is the method of a module.
            name = _INNERMOST.search(token)[0].partition(".")[0]  # type: ignore[index]
            if name in module.inside:
                module = module.inside[name]
                module.work.add(one, times)
        if module is root:
            name = _ELSEWHERE if "jvp(" in op_name else _UPDATE
            root.inside.setdefault(name, Module()).work.add(one, times)


def table(
    root: Module, config: FlopsProfilerConfig, seconds: float | None, forecast: str, waited: float
) -> str:
    """The profile of a step as text.

    Args:
      root: The modules, with their work.
      config: What of them is listed.
      seconds: The measured time of the step; None where none was measured.
      forecast: The kind of devices that the times of modules are forecast for; "" without them.
      waited: Seconds of the forecast in which a step waits for collectives and copies.
    """
    whole = root.work
    lines = [
        f"flops_profiler: step {config.profile_step}, of each device",
        f"parameters {_count(root.parameters)}; matrix products {_count(whole.flops)}FLOPs, "
        f"{_count(whole.forward)}FLOPs of them in the forward pass",
    ]
    if seconds:
        lines += [f"measured: {1e3 * seconds:.3g} ms, {_count(whole.flops / seconds)}FLOPs a second"]
    total = whole.seconds + waited
    if forecast:
        share = waited / total if total else 0.0
        lines += [
            f"forecast for {forecast}: {1e3 * total:.3g} ms, {share:.1%} of it waiting for "
            "collectives and copies"
        ]
    else:
        lines += ["no time of modules: the forecast knows no such devices"]
    deepest = math.inf if config.module_depth < 0 else config.module_depth
    every = [each for each in root.below() if each[1] <= deepest]
    named = [each for each in every if each[0][:1] != "("]
    if not any(module.work.flops for name, module in root.inside.items() if name[:1] != "("):
        lines += [
            "no operation has the name of a module: flax linen writes names, in NNX "
            "jax.named_scope(...) in a __call__ does"
        ]
    for depth in sorted({depth for _, depth, _ in named}):
        at = [(name, module.work.flops) for name, d, module in named if d == depth]
        largest = sorted(at, key=lambda item: -item[1])[: config.top_modules]
        told = (f"{name or 'all'} {_count(flops)}FLOPs" for name, flops in largest)
        lines += [f"depth {depth}: {', '.join(told)}"] if largest else []
    if config.detailed:
        rows = [("module", "parameters", "FLOPs", "of FLOPs", *(["of time"] if forecast else []))]
        rows += [
            (
                "  " * depth + (name.rpartition("/")[2] or "all"),
                _count(module.parameters),
                _count(module.work.flops),
                f"{module.work.flops / (whole.flops or 1):.1%}",
                *([f"{module.work.seconds / (total or 1):.1%}"] if forecast else []),
            )
            for name, depth, module in every
        ]
        lines += columns(rows, right=range(1, len(rows[0])))
    return "\n".join(lines)


def _count(n: float) -> str:
    """A number for people, in powers of 1000.

    Example:
      >>> _count(35_104), _count(6.7e9)
      ('35.1 K', '6.7 G')
    """
    for unit in ("", "K", "M", "G", "T"):
        if n < 1000 or unit == "T":
            break
        n /= 1000
    return f"{n:.3g} {unit}"
