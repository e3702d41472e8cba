"""`zeropp_loco_param`: values, refusals, remedies."""

from typing import Any

import pytest

from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.keys.loco import Loco


def config(loco: Any, **more: Any) -> dict[str, Any]:
    zero = {"stage": 2, "zero_quantized_gradients": True, "zeropp_loco_param": loco} | more
    return {"zero_optimization": zero}


def test_deepspeeds_form() -> None:
    got = load(config({"err_beta": 0.5, "reset_T": 7}))
    assert got.zeropp_loco_param == Loco(err_beta=0.5, reset_T=7)
    assert load(config({})).zeropp_loco_param == Loco(err_beta=0.8, reset_T=1024)
    assert load(config(None)).zeropp_loco_param is None
    assert load(config("auto")).zeropp_loco_param is None
    assert ZeroConfig.from_keywords(
        stage=1, zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0}
    ).zeropp_loco_param == Loco(err_beta=0)


@pytest.mark.parametrize(
    "loco", [5, True, {"err_beta": 1}, {"reset_T": 0}, {"reset_T": 1.5}, {"beta": 0.5}]
)
def test_other_values_are_refused(loco: Any) -> None:
    with pytest.raises(ConfigError, match=r'zeropp_loco_param: expected an object as \{"err_beta"'):
        load(config(loco))


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"zero_quantized_gradients": False}, "zero_quantized_gradients to true, or take"),
        ({"stage": 0}, "set zero_optimization.stage to 1, or take"),
        ({"offload_optimizer": {"device": "cpu"}}, "leave out one of them"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "leave out one of them"),
    ],
)
def test_what_error_feedback_excludes(more: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"zeropp_loco_param.*{remedy}"):
        load(config({}, **more))
