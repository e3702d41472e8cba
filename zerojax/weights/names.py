"""The names that a model's parameters have as tensors elsewhere, as data.

>>> names = Names({
...     "embed/embedding": "model.embed_tokens.weight",
...     "layers_{i}/{x:path}/kernel": Tensor("model.layers.{i}.{x}.weight", "o i -> i o"),
... })
>>> linked = link(names, {"embed/embedding": (64, 8), "layers_0/mlp/up/kernel": (8, 32)})
>>> linked.tensors
{'model.embed_tokens.weight': (64, 8), 'model.layers.0.mlp.up.weight': (32, 8)}
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerojax.weights.arrangement import Arrangement, Link, Parts

SHOWN = 5
_HELD = re.compile(r"\{(\w+)(?::(\w+))?\}")
_KINDS = {None: r"[^/.]+", "int": r"\d+", "path": r".+"}


@dataclass(frozen=True)
class Tensor:
    """The tensor of a parameter, or several that make it up.

    Attributes:
      name: The tensor's; ``{layer}`` in it stands for what the pattern of the path has there, or
        for each index of the axis ``layer`` of the parameter.
      arrangement: The tensor's axes, ``->`` and the parameter's, as einops writes them:
        ``"o i -> i o"`` transposes, ``"(head d) i -> i head d"`` gives heads a dimension,
        ``"o i -> layer i o"`` stacks the tensors of all layers,
        ``"i (part o) -> i o"`` with ``part`` in the path takes one part of a fused tensor, and
        ``"o i -> i (part o)"`` with ``{part}`` in the name fuses several tensors.
      parts: The values of such an axis, in their order: ``{"part": ["query", "key", "value"]}``;
        with the length of each where they differ, ``{"part": {"q": 4096, "k": 1024}}``. Without
        them they are 0, 1, 2 ...
      sizes: Lengths of axes that the parameter's shape does not show.
      tied: Another parameter is made of the same elements. ``save`` compares the two.
    """

    name: str
    arrangement: str = "... -> ..."
    parts: Parts = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True)
class Names:
    """The tensors of all parameters of a model.

    Attributes:
      tensors: By parameter, its keys with ``/`` between. In a pattern ``{module}`` stands for any
        text without ``/`` and ``.``, ``{layer:int}`` for a number and ``{module:path}`` for any
        text; in the tensor's name each ``/`` of what stood there becomes a dot. The first pattern
        that fits counts. A name alone is a tensor like the parameter, None no tensor:
        ``load`` leaves that parameter as it is, and ``save`` leaves it out.
      prefix: What may precede a tensor's name in a file or may be missing there: ``"model."``.
      ignored: Patterns of tensors in a file that are of no parameter.
      tied: Tensors that may be in a file as copies of others: ``{"lm_head.weight": "wte.weight"}``.
    """

    tensors: Mapping[str, str | Tensor | None]
    prefix: str = ""
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Names | Mapping[str, str | Tensor | None] | None) -> Names:
        """Names from a mapping alone; without one each tensor has its path, dots between."""
        if names is None:
            return cls({"{path:path}": "{path}"})
        return names if isinstance(names, Names) else cls(names)

    def is_ignored(self, tensor: str) -> bool:
        """Whether a tensor of a file, without the prefix, is of no parameter."""
        return any(pattern_of(each).fullmatch(tensor) for each in self.ignored)


class Linked(NamedTuple):
    """Parameters and the tensors they are made of.

    Attributes:
      links: By parameter; without those that have no tensors.
      tensors: Shapes of the tensors, by name.
      tied: Parameters whose tensors other parameters are made of.
    """

    links: dict[str, tuple[Link, ...]]
    tensors: dict[str, tuple[int, ...]]
    tied: frozenset[str]


def link(
    names: Names | Mapping[str, str | Tensor | None] | None, shapes: Mapping[str, Sequence[int]]
) -> Linked:
    """The tensors of parameters, whose shapes are given by path.

    Raises:
      ValueError: A parameter has no name, the map names an unknown one, an arrangement does not fit
        a shape, or elements of a tensor are in no parameter, or in several.
    """
    names = Names.of(names)
    for pattern in (*names.tensors, *names.ignored):
        pattern_of(pattern)
    problems = [
        f"{pattern} is no parameter of the model{_near(pattern, shapes)}"
        for pattern in names.tensors
        if not _HELD.search(pattern) and pattern not in shapes
    ]
    links: dict[str, tuple[Link, ...]] = {}
    tied = set()
    for path, shape in shapes.items():
        try:
            rule, given = _rule(names, path)
            if rule is None:
                continue
            arrangement = Arrangement.parse(rule.arrangement)
            found = arrangement.links(rule.name, given, shape, rule.parts, rule.sizes)
            links[path] = tuple(found)
        except LookupError:
            problems.append(f"{path} {[*shape]} has no name{_near(path, names.tensors)}")
        except ValueError as error:
            problems.append(f"{path} {[*shape]}: {error}")
        else:
            tied |= {path} if rule.tied else set()
    tensors: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    held: dict[str, int] = {}
    for path, parts in links.items():
        for part in parts:
            owner = owners.setdefault(part.tensor, path)
            if tensors.setdefault(part.tensor, part.tensor_shape) != part.tensor_shape:
                problems.append(
                    f"{part.tensor} is {[*part.tensor_shape]} by {path}, and "
                    f"{[*tensors[part.tensor]]} by {owner}"
                )
            held[part.tensor] = held.get(part.tensor, 0) + (0 if path in tied else part.size)
    problems += [
        _uncovered(name, shape, held[name])
        for name, shape in tensors.items()
        if held[name] != math.prod(shape)
    ]
    refuse("the names do not fit the parameters", problems, "Nothing was read or written.")
    return Linked(links, tensors, frozenset(tied))


def refuse(what: str, problems: Sequence[str], remedy: str) -> None:
    """Raises ValueError with the first few problems, where any exist."""
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("\n  ".join([f"{what}:", *problems[:SHOWN], *more]) + f"\n{remedy}")


@functools.cache
def pattern_of(text: str) -> re.Pattern[str]:
    """The regular expression of a pattern with ``{name}``, ``{name:int}`` and ``{name:path}``.

    Raises:
      ValueError: Another word follows the colon.
    """
    made, at = "", 0
    for match in _HELD.finditer(text):
        if match[2] not in _KINDS:
            raise ValueError(f"{text}: {match[0]} is none of {{x}}, {{x:int}}, {{x:path}}")
        made += re.escape(text[at : match.start()])
        again = f"(?P<{match[1]}>" in made
        made += f"(?P={match[1]})" if again else f"(?P<{match[1]}>{_KINDS[match[2]]})"
        at = match.end()
    return re.compile(made + re.escape(text[at:]))


def _rule(names: Names, path: str) -> tuple[Tensor | None, dict[str, str]]:
    """The first rule that fits, and what its pattern has in the path. LookupError without one."""
    for pattern, tensor in names.tensors.items():
        if match := pattern_of(pattern).fullmatch(path):
            given = {name: text.replace("/", ".") for name, text in match.groupdict().items()}
            return Tensor(tensor) if isinstance(tensor, str) else tensor, given
    raise LookupError(path)


def _near(text: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(text, known, n=1)
    return f"; the nearest is {close[0]}" if close else ""


def _uncovered(name: str, shape: Sequence[int], held: int) -> str:
    size = math.prod(shape)
    if held > size:
        return (
            f"{name} {[*shape]} has {size} elements, and parameters take {held} of them: give all "
            "but one of these parameters Tensor(..., tied=True)"
        )
    return f"{name} {[*shape]} has {size} elements, and the parameters take {held} of them"
