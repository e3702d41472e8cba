"""The device groups of a collective, by the devices' numbers in the program.

    replica_groups(instruction, devices=8)    # ((0, 1, 2, 3), (4, 5, 6, 7))

The devices of a program are numbered in the order of the mesh that it was compiled for.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from zerojax.hlo.program import Instruction

Groups = tuple[tuple[int, ...], ...]

_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?\w*mesh\w*\[([^\]]*)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))?[^{]*\{([^}]*)\}"
)


def replica_groups(instruction: Instruction, devices: int) -> Groups:
    """Returns the groups of a collective, from any of the forms that XLA prints.

    ``{{0,1},{2,3}}`` lists the groups, ``[2,4]<=[4,2]T(1,0)`` splits a transposed iota into groups,
    ``mesh['x'=4,'y'=2] {'x'}`` names the axes of a mesh of all devices, with its ``device_ids`` if
    they are not in order, and ``{}`` is one group of all devices. In a permute, each pair of source
    and target is a group.
    """
    forms = ((_PAIRS, _listed), (_LISTED, _listed), (_IOTA, _counted), (_MESH, _along))
    for form, read in forms:
        if match := form.search(instruction.attributes):
            return read(*match.groups())
    return (tuple(range(devices)),)


@functools.lru_cache(maxsize=256)
def _listed(text: str) -> Groups:
    return tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", text))) or ((0,),)


@functools.lru_cache(maxsize=256)
def _counted(groups: str, sizes: str, order: str | None) -> Groups:
    return _rows(_iota(sizes, order).reshape(_numbers(groups)))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    shape = _numbers(sizes)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_numbers(order)) if order else numbers


@functools.lru_cache(maxsize=256)
def _along(axes: str, ids: str | None, order: str | None, listed: str | None, named: str) -> Groups:
    """Returns the groups along axes of a mesh, where ``'a':(2)4`` is the middle of 2 x 4 x rest."""
    sizes = {name: int(size) for name, size in re.findall(r"['\"]?([^'\",]+)['\"]?=(\d+)", axes)}
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    coordinates = dict(zip(sizes, np.indices(numbers.shape), strict=True))
    member_index, group_base = np.zeros_like(numbers), numbers.copy()
    for name, before, part in re.findall(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?", named):
        size = int(part or sizes[name])
        step = sizes[name] // (int(before or 1) * size)
        digit = coordinates[name] // step % size
        member_index = member_index * size + digit
        stride = math.prod(list(sizes.values())[list(sizes).index(name) + 1 :])
        group_base -= digit * step * stride
    groups = np.lexsort((member_index.ravel(), group_base.ravel())).reshape(
        len(np.unique(group_base)), -1
    )
    devices = np.array(_numbers(listed)) if listed else _iota(ids, order) if ids else numbers
    return _rows(devices.ravel()[groups])


def _rows(groups: np.ndarray) -> Groups:
    return tuple(map(tuple, groups.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
