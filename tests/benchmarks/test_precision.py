"""fp16 follows fp32 on the main job; the benchmark's 1000 steps, in small."""

from pathlib import Path

import pytest

from benchmarks.precision import ALLOWED, Run, draw, run, table


@pytest.mark.sweep
@pytest.mark.usefixtures("quick_compile")
def test_fp16_follows_fp32(tmp_path: Path) -> None:
    runs = [run(precision, 24, "tiny", tmp_path, 2) for precision in ("fp32", "fp16")]
    assert runs[0].held_out[-1][1] < runs[0].held_out[0][1] - 0.5  # it learns
    assert 0 < max(runs[1].parts_from(runs[0])) < ALLOWED
    draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert len(table(runs)) == 3


def test_the_distance_is_the_largest_one() -> None:
    def made(train: list[float], held_out: list[float]) -> Run:
        return Run(
            precision="", tokens_per_second=1.0, train=train, held_out=list(enumerate(held_out))
        )

    far = made([2.0] * 40, [1.0, 1.1, 1.0]).parts_from(made([2.0] * 20 + [1.0] * 20, [1.0] * 3))
    assert far == pytest.approx((0.1, 1.0))
