"""The day on a GPU, rehearsed: every measurement can be called."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json

import pytest

from benchmarks.gpu_day import plan
from benchmarks.gpu_day.measurement import PARTS


@pytest.mark.parametrize("toy", [False, True])
def test_every_order_can_be_carried_out(toy: bool) -> None:
    wanted = plan.measurements(toy)
    names = [each.name for each in wanted]
    assert len(set(names)) == len(names)
    assert {each.part for each in wanted} == set(range(1, len(PARTS) + 1))
    assert [each.tier for each in wanted] == sorted(each.tier for each in wanted)
    for each in wanted:
        module, name = each.function.split(":")
        assert module in plan.MODULES
        function = getattr(importlib.import_module(f"benchmarks.gpu_day.{module}"), name)
        inspect.signature(function).bind(**json.loads(json.dumps(dict(each.arguments))))
        assert each.seconds < 9 * 60
