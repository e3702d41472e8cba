"""A short list of combinations in which any two values of different factors meet."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]


def cover(
    factors: Mapping[str, Iterable[Any]],
    valid: Callable[[Row], bool],
    *,
    within: Iterable[str] | None = None,
    given: Iterable[Row] = (),
) -> list[Row]:
    """Combinations that cover all pairs of values of the factors, one value of each factor a row.

    Greedy: each row is the best of a few random ones that have an uncovered pair (Cohen et al.,
    The AETG system, 1997). The same arguments give the same rows.

    Args:
      factors: values by name.
      valid: whether a row, perhaps without some of the factors, may stand; one that may not
        does not become so by further factors.
      within: names of the factors whose pairs are to be covered; default all.
      given: rows that are there already, whose pairs count as covered.
    """
    values = {name: tuple(several) for name, several in factors.items()}
    names = [name for name in values if within is None or name in set(within)]
    size = min(2, len(names))  # of one factor alone: each of its values
    wanted = {
        pair
        for several in itertools.combinations(names, size)
        for pair in itertools.product(*([(name, v) for v in values[name]] for name in several))
    }
    order = sorted(wanted, key=repr)
    for row in given:
        wanted -= pairs(row, names, size)
    draw, rows = random.Random(0), []
    for pair in order:
        if pair not in wanted:
            continue
        tries = [row for _ in range(8) if (row := completed(dict(pair), values, valid, draw))]
        if not tries:
            continue  # the two values exclude each other
        best = max(tries, key=lambda row: len(pairs(row, names, size) & wanted))
        wanted -= pairs(best, names, size)
        rows.append({name: best[name] for name in values})
    return rows


def pairs(row: Row, names: Iterable[str], size: int) -> set[Any]:
    return set(itertools.combinations([(name, row[name]) for name in names], size))


def completed(
    row: Row,
    values: Mapping[str, tuple[Any, ...]],
    valid: Callable[[Row], bool],
    draw: random.Random,
) -> Row | None:
    """The row with a random value for each factor that it lacks; None where none fits."""
    if not valid(row):
        return None
    missing = [name for name in values if name not in row]
    draw.shuffle(missing)
    for name in missing:
        fits = [value for value in values[name] if valid(row | {name: value})]
        if not fits:
            return None
        row = row | {name: draw.choice(fits)}
    return row
