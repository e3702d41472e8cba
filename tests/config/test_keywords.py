"""The typed keywords of ``zerojax.zero`` are the fields of its config."""

import dataclasses
import typing
from collections.abc import Mapping

import pytest

import zerojax
from zerojax.config import ConfigError, ZeroConfig
from zerojax.config.keywords import Keywords
from zerojax.config.settings import XLA


def test_they_are_the_fields() -> None:
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    assert {*Keywords.__annotations__} - {*XLA} == fields - {
        "notes",
        "check_finite",
        "accumulate_statistics",
    }


def test_they_have_the_types_of_the_fields() -> None:
    """Sections take a mapping too."""
    config, keywords = typing.get_type_hints(ZeroConfig), typing.get_type_hints(Keywords)
    for name, kind in keywords.items():
        if name == "xla" or name in XLA:
            continue
        allowed, own = {*typing.get_args(kind)} or {kind}, typing.get_args(config[name])
        assert allowed >= ({*own} or {config[name]}), name
        assert allowed - {*own, config[name]} <= {
            Mapping[str, object],
            str,
            *[bool] * (name == "fp8"),
        }, name


def test_a_type_checker_finds_wrong_ones() -> None:
    """mypy would report an ignored error that is not there."""
    with pytest.raises(ConfigError, match="did you mean `stage`"):
        zerojax.zero(stag=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="stage"):
        zerojax.zero(stage="three")  # type: ignore[arg-type]
    zerojax.zero(stage=3, bf16=True, offload_optimizer="cpu", offload_param={"device": "cpu"})
