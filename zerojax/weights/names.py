"""Tensor names of a model's parameters in another library, as data.

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
_REMEDY = (
    "Nothing was read or written. Give each parameter, by its path, the name of a tensor or "
    "None: names={'h_0/kernel': 'h.0.weight'}."
)
_PLACEHOLDER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_KINDS = {None: r"[^/.]+", "int": r"\d+", "path": r".+"}


@dataclass(frozen=True)
class Tensor:
    """The tensor of a parameter, or several tensors that together form the parameter.

    Attributes:
      name: The tensor's name; ``{layer}`` in it stands for the text that the path's pattern matched
        there, or for each index of the parameter's axis ``layer``.
      arrangement: The tensor's axes, ``->`` and the parameter's axes, in einops' notation:
        ``"o i -> i o"`` transposes, ``"(head d) i -> i head d"`` gives heads a dimension,
        ``"o i -> layer i o"`` stacks the tensors of all layers,
        ``"i (part o) -> i o"`` with ``part`` in the path takes one part of a fused tensor, and
        ``"o i -> i (part o)"`` with ``{part}`` in the name fuses several tensors.
      parts: The values of such an axis, in order: ``{"part": ["query", "key", "value"]}``; if their
        lengths differ, with the length of each: ``{"part": {"q": 4096, "k": 1024}}``. The default
        values are 0, 1, 2 ...
      tied: Whether another parameter uses the same elements; ``save`` compares the two.
    """

    name: str
    arrangement: str = "... -> ..."
    parts: Parts = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True)
class Names:
    """The tensors of all parameters of a model.

    Attributes:
      tensors: Tensors by parameter path, its keys joined with ``/``, or by a pattern of paths. In a
        pattern, ``{module}`` matches any text without ``/`` and ``.``, ``{layer:int}`` a number and
        ``{module:path}`` any text; in the tensor's name, each ``/`` of the matched text becomes a
        dot. The first matching pattern applies. A plain string names a tensor of the parameter's
        shape. None means that the parameter has no tensor: ``load`` leaves the parameter unchanged,
        and ``save`` omits it.
      prefix: An optional prefix of tensor names in a file, such as ``"model."``.
      ignored: Patterns of tensors in a file that belong to no parameter.
      tied: Tensors that a file may hold as copies of others: ``{"lm_head.weight": "wte.weight"}``.
      aliases: Patterns of other names that files have for tensors, without the prefix:
        ``{"{module:path}.gamma": "{module}.weight"}``. ``save`` does not use them.
    """

    tensors: Mapping[str, str | Tensor | None]
    prefix: str = ""
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Names | Mapping[str, str | Tensor | None] | None) -> Names:
        """Converts a mapping to names; for None, each tensor's name is its path with dots."""
        if names is None:
            return cls({"{path:path}": "{path}"})
        return names if isinstance(names, Names) else cls(names)

    def short(self, tensor: str) -> str:
        """Returns the name of a file's tensor without the prefix, for an alias the name it means.

        >>> Names({}, prefix="bert.", aliases={"{x}.gamma": "{x}.weight"}).short("bert.norm.gamma")
        'norm.weight'
        """
        name = tensor.removeprefix(self.prefix)
        for pattern, meant in self.aliases.items():
            if match := pattern_of(pattern).fullmatch(name):
                return meant.format_map(match.groupdict())
        return name

    def is_ignored(self, tensor: str) -> bool:
        """Returns whether a tensor name, without the prefix, matches a pattern of ``ignored``."""
        return any(pattern_of(each).fullmatch(tensor) for each in self.ignored)


class Linked(NamedTuple):
    """Parameters and the tensors that they consist of.

    Attributes:
      links: Links to tensors, by parameter; parameters without tensors are left out.
      tensors: Shapes of the tensors, by name.
      tied: Parameters with ``tied=True``, which use the tensors of other parameters.
    """

    links: dict[str, tuple[Link, ...]]
    tensors: dict[str, tuple[int, ...]]
    tied: frozenset[str]


def link(
    names: Names | Mapping[str, str | Tensor | None] | None, shapes: Mapping[str, Sequence[int]]
) -> Linked:
    """Links parameters, passed as shapes by path, to their tensors.

    Raises:
      ValueError: A parameter has no name, the map names an unknown parameter, an arrangement does
        not fit a shape, or elements of a tensor are in no parameter, or in several.
    """
    names = Names.of(names)
    for pattern in (*names.tensors, *names.ignored):
        pattern_of(pattern)
    problems = [
        f"{pattern} is no parameter of the model{_near(pattern, shapes)}"
        for pattern in names.tensors
        if not _PLACEHOLDER.search(pattern) and pattern not in shapes
    ]
    links: dict[str, tuple[Link, ...]] = {}
    tied = set()
    for path, shape in shapes.items():
        try:
            rule, given = _rule(names, path)
            if rule is None:
                continue
            arrangement = Arrangement.parse(rule.arrangement)
            found = arrangement.links(rule.name, given, shape, rule.parts)
            links[path] = tuple(found)
        except LookupError:
            problems.append(f"{path} {[*shape]} has no name{_near(path, names.tensors)}")
        except ValueError as error:
            problems.append(f"{path} {[*shape]}: {error}")
        else:
            tied |= {path} if rule.tied else set()
    tensors: dict[str, tuple[int, ...]] = {}
    owners: dict[str, str] = {}
    covered: dict[str, int] = {}
    for path, parts in links.items():
        for part in parts:
            owner = owners.setdefault(part.tensor, path)
            if tensors.setdefault(part.tensor, part.tensor_shape) != part.tensor_shape:
                problems.append(
                    f"{part.tensor} is {[*part.tensor_shape]} by {path}, and "
                    f"{[*tensors[part.tensor]]} by {owner}"
                )
            covered[part.tensor] = covered.get(part.tensor, 0) + (0 if path in tied else part.size)
    problems += [
        _uncovered(name, shape, covered[name])
        for name, shape in tensors.items()
        if covered[name] != math.prod(shape)
    ]
    refuse("the names do not fit the parameters", problems, _REMEDY)
    return Linked(links, tensors, frozenset(tied))


def refuse(what: str, problems: Sequence[str], remedy: str) -> None:
    """Raises ValueError with the first ``SHOWN`` problems, if any exist."""
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("\n  ".join([f"{what}:", *problems[:SHOWN], *more]) + f"\n{remedy}")


@functools.cache
def pattern_of(text: str) -> re.Pattern[str]:
    """Compiles a pattern with ``{name}``, ``{name:int}`` and ``{name:path}`` to a regex.

    Raises:
      ValueError: Another word follows the colon.
    """
    regex, position = "", 0
    for match in _PLACEHOLDER.finditer(text):
        if match[2] not in _KINDS:
            raise ValueError(f"{text}: {match[0]} is unknown: write {{x}}, {{x:int}} or {{x:path}}")
        regex += re.escape(text[position : match.start()])
        is_repeated = f"(?P<{match[1]}>" in regex
        regex += f"(?P={match[1]})" if is_repeated else f"(?P<{match[1]}>{_KINDS[match[2]]})"
        position = match.end()
    return re.compile(regex + re.escape(text[position:]))


def _rule(names: Names, path: str) -> tuple[Tensor | None, dict[str, str]]:
    """Returns the first matching rule and the texts it matched; LookupError if none matches."""
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
            f"{name} {[*shape]} has {size} elements, and parameters take {held} of them: set "
            "Tensor(..., tied=True) for all but one of them"
        )
    return f"{name} {[*shape]} has {size} elements, and the parameters take {held} of them"
