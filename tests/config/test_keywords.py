"""The typed keywords of ``zerojax.zero`` are the fields of its config."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest
from mypy import api

from zerojax.config import ZeroConfig
from zerojax.config.keywords import Keywords

ZEROS = """
import zerojax

zerojax.zero(stage=3, bf16=True, offload_optimizer="cpu")
zerojax.zero(stage=2, offload_param={"device": "cpu"})
zerojax.zero(stag=3)
zerojax.zero(stage="three")
"""


def test_they_are_the_fields() -> None:
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    assert {*Keywords.__annotations__} == fields - {"notes", "check_finite"}  # an argument of zero


def test_they_have_the_types_of_the_fields() -> None:
    """Sections take a mapping too."""
    config, keywords = typing.get_type_hints(ZeroConfig), typing.get_type_hints(Keywords)
    for name, kind in keywords.items():
        allowed, own = {*typing.get_args(kind)} or {kind}, typing.get_args(config[name])
        assert allowed >= ({*own} or {config[name]}), name
        assert allowed - {*own, config[name]} <= {Mapping[str, typing.Any], str}, name


@pytest.mark.slow
def test_a_type_checker_finds_wrong_ones(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(ZEROS)
    said, _, _ = api.run([str(file), "--no-incremental", "--follow-imports=silent"])
    lines = [line for line in said.splitlines() if ": error:" in line]
    assert ["stag" in lines[0], "stage" in lines[1]] == [True, True], said
    assert len(lines) == 2, said
