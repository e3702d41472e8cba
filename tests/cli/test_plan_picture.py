"""The picture of `zerojax plan`: what is in it, and where it may be written."""

import re
from pathlib import Path

import pytest
from cli.made_up import GB, cost, forecast

from zerojax.cli.plan_picture import by_stage, draw
from zerojax.foresight.choice import Choice


def test_every_stage_has_its_bar(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stages = {f"stage {n}": forecast(cost(memory={"logits": (90 - n) * GB})) for n in range(4)}
    for suffix in (".svg", ".png"):
        draw(tmp_path / f"a{suffix}", "mine, batch 64", stages)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text()
    words = ["stage 0", "stage 3", "90 GB", "87 GB", "logits", "device memory", "mine, batch 64"]
    assert all(f"<!-- {word} -->" in text for word in words)
    assert "<!-- activations -->" not in text


def test_each_bar_has_the_memory_of_its_device(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def lines(*kinds: str) -> set[str]:
        bars = {kind: forecast(cost(), kind=kind) for kind in kinds}
        draw(tmp_path / "a.svg", "8B", bars)
        dashed = re.findall(r'<path d="M (\S+) \S+ \nL \1 \S+ \n"[^>]*stroke-dasharray', written())
        return {*dashed}

    def written() -> str:
        return (tmp_path / "a.svg").read_text()

    assert len(lines("h100")) == 1
    assert len(lines("rtx-4090", "h100")) == 2
    assert written().count("<!-- device memory -->") == 1


def test_the_stages_of_a_choice() -> None:
    given = Choice(stage=2, micro=4, remat=True, offload="optimizer")
    made = dict(by_stage(given))
    assert [*made] == ["stage 0", *(f"stage {n}, optimizer offloaded" for n in (1, 2, 3))]
    assert [choice.stage for choice in made.values()] == [0, 1, 2, 3]
    assert all(choice.possible for choice in made.values())
    assert {(choice.micro, choice.remat) for choice in made.values()} == {(4, True)}
    assert given in made.values()
