"""The README, the configs and the code agree."""

import re
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def first_block() -> list[str]:
    return re.search(r"^```\w*\n(.*?)^```", README, re.S | re.M).group(1).splitlines()


def test_readme_starts_with_the_two_commands():
    run, test = first_block()
    assert run.endswith("-m examples.run_clm")
    assert "-m pytest" in test
    assert "compile" in test  # the GPU compiles are part of the tests


def test_every_path_that_the_readme_names_is_there():
    named = re.findall(
        r"`((?:zerojax|configs|tests|examples|benchmarks|pallas_kernels)/[\w./-]*)`", README
    )
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_link_to_a_file_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.name)
def test_every_config_makes_a_zero(path):
    zero = zerojax.zero(path)
    assert str(zero.config.stage) in path.name
    assert zero.config.bf16 == any(w in path.name for w in ("bf16", "offload", "nvme"))
    assert zero.config.fp16 == ("fp16" in path.name)
    assert zero.optimizer() is not None
