"""What `zerojax plan` prints, from a forecast that is made up: tables and JSON."""

import dataclasses
import json
import re

import pytest
from cli.made_up import GB, GIVEN, cost, forecast, planned

from zerojax.cli.plan_table import show
from zerojax.cli.planned import Planned, values
from zerojax.cli.terminal import as_json
from zerojax.devices.rates import rates
from zerojax.foresight.forecast import Again, Compile, Traffic
from zerojax.foresight.trials import Trial
from zerojax.plan.table import size
from zerojax.xla.compiler import SLOP


def printed(made: Planned, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(made)
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def row(lines: list[str], first: str) -> list[str]:
    (cells,) = [cells for line in lines if (cells := re.split(r" {2,}", line))[0] == first]
    return cells[1:]


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(planned(), capsys)
    assert lines[:2] == [
        "mine:[red], 6,738,415,616 parameters, a.json, 8 x h100",
        "stage 3, no remat, batch 64 = 4 x 2 x 8 (micro-batch x accumulation x devices), "
        "1024 tokens in a row",
    ]
    assert row(lines, "parameters") == ["20 GB", "█" * 6]
    assert row(lines, "total") == ["30 GB", "█" * 8]
    assert row(lines, "device memory") == ["84.9 GB", "█" * 24]
    assert row(lines, "headroom") == [size(84942979072 - 3 * GB // 2 - 30 * GB - 123)]
    assert row(lines, "all-gather") == ["bf16, f32", "1,234", "5 GB", "500 ms", "75%"]
    assert row(lines, "to the device") == ["7", "3 GB", "20 ms", "0%"]
    assert "predicted step time: 2 s, 32,768 tokens/s, MFU 30.3%" in lines
    assert "as measured on an H200" in lines[-3]
    assert lines[-2] == "on NVLink all-reduces 82% and reduce-scatters 63%, as published"
    assert lines[-1] == "compiled in 12 s"
    whole = "\n".join(lines)
    assert all(word not in whole for word in ("does not fit", "host memory", "disk", "PREALLOC"))


def test_words_of_the_tables_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    made = cost()
    memory = {**made.memory, "other": GB, "gaps": GB}
    lines = printed(planned(forecast(dataclasses.replace(made, memory=memory))), capsys)
    for word in ("hidden", "other", "gaps"):
        assert len([line for line in lines if line.startswith(f"{word}: ")]) == 1
    assert not [line for line in printed(planned(), capsys) if line.startswith(("other:", "gaps:"))]


def test_traffic_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = (Traffic("all-gather", ("bf16",), 10, 8 * GB, GB, 0.5, 0.1),)
    lines = printed(planned(forecast(cost(traffic=traffic))), capsys)
    assert row(lines, "all-gather") == ["bf16", "10", "8 GB", "1 GB", "500 ms", "80%"]
    links = "NVLink 450 GB/s inside a node, 50 GB/s (400 Gb/s) between nodes"
    assert any(line.endswith(links) for line in lines)


def test_pipeline_stages(capsys: pytest.CaptureFixture[str]) -> None:
    found = forecast(cost(boundary=GB), axes={"stage": 4, "data": 2})
    made = planned(found, choice=dataclasses.replace(GIVEN, accumulation=8))
    lines = printed(made, capsys)
    assert "batch 64 = 4 x 8 x 2 (micro-batch x accumulation x devices of a stage)" in lines[1]
    assert lines[2] == (
        "pipeline: GPipe, 4 stages, 8 micro-batches in 11 ticks, in 27% of which a stage idles "
        "(the bubble); a stage keeps activations of all of them; 1 GB at a boundary"
    )
    told = values(made)
    assert told["pipeline"] == {
        "stages": 4, "micro_batches": 8, "ticks": 11, "bubble": 3 / 11,
    }  # fmt: skip
    assert told["boundary"] == GB
    assert found.mfu == pytest.approx(forecast().mfu * 8 / 11)  # idle ticks compute for nothing


def test_the_json_holds_every_figure() -> None:
    told = json.loads(json.dumps(as_json(values(planned()))))
    assert told["pipeline"] is None
    assert told["memory"] == {
        "parameters": 20 * GB,
        "activations": 10 * GB,
        "logits": 123,
    }
    assert told["peak"] == 30 * GB + 123
    assert told["rates"]["memory"] == told["reserve"] + told["headroom"] + told["peak"]
    assert told["traffic"][0] == {
        "kind": "all-gather", "dtypes": ["bf16", "f32"], "times": 1234, "bytes": 5 * GB,
        "between_nodes": 0, "seconds": 0.5, "waited": 0.125,
    }  # fmt: skip
    links = told["rates"]["links"]
    assert (links["name"], links["inside"], links["between"]) == ("NVLink", 450e9, 50e9)
    assert (told["seconds"], told["tokens"]) == (2.0, 65536)
    assert (told["tokens_per_second"], told["mfu"]) == (32768.0, 6e14 / 989e12 / 2)
    assert told["choice"] == json.loads(json.dumps(dataclasses.asdict(GIVEN)))
    assert (told["rows"], told["seq"], told["compile_seconds"]) == (64, 1024, 12.0)
    assert (told["rates"]["kind"], told["devices"]) == ("h100", 8)
    assert told["fits"]
    assert told["remedies"] is None


def test_a_step_above_xlas_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """An H100 has 84.9 GB: of four fifths the arguments, and 95% of the rest."""
    begins = 10 * GB + 0.95 * (0.8 * 84942979072 - 10 * GB)

    def told(peak: float, again: int = 0, slop: int = SLOP) -> str:
        repeated = {"again": Again(again, 3 * GB, 0.02)} if again else {}
        memory, compiled = {"activations": int(peak)}, Compile(12.0, slop=slop)
        found = forecast(cost(memory=memory, arguments=10 * GB, compile=compiled, **repeated))
        if slop == SLOP:
            assert found.spare == pytest.approx(begins - peak, abs=2)
        return " ".join(printed(planned(found), capsys))

    assert "limit" not in told(begins - GB)
    assert "warning: the step exceeds XLA's limit of 65.1 GB, above which no collective" in told(
        begins + GB
    )
    raised = told(begins + GB, slop=125)
    assert "which zerojax raises so that collectives overlap" in raised
    assert "xla_gpu_memory_limit_slop_factor=125" in raised
    over = told(begins + GB, again=7)
    assert "warning: XLA recomputes 7 values to save memory, 3 GB and 20 ms of a step" in over
    assert "let blocks keep less (--remat, or the policy that `zerojax fit` finds)" in over


def test_several_programs(capsys: pytest.CaptureFixture[str]) -> None:
    small = cost("update [1]", memory={"parameters": GB}, seconds=0.25, traffic=())
    found = forecast(cost("gradients"), small, host_bytes=7 * GB, disk_bytes=2 * GB)
    lines = printed(planned(found), capsys)
    assert row(lines, "gradients") == ["30 GB", "2 s", "12 s", "the peak above"]
    assert row(lines, "update [1]") == ["1 GB", "250 ms", "12 s"]
    assert "host memory, for each device: 7 GB" in lines
    assert "disk, for each device: 2 GB" in lines
    told = values(planned(found))
    assert told["programs"] == found.programs
    assert told["program"] == "gradients"
    assert (told["host_bytes"], told["disk_bytes"]) == (7 * GB, 2 * GB)


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """And what does instead, in the words of the JSON."""
    small = forecast(cost(memory={"parameters": 8 * GB}, seconds=3.0), host_bytes=GB)
    choice = dataclasses.replace(GIVEN, remat=True, offload="optimizer")
    made = planned(forecast(kind="rtx-3090"), remedies=(Trial(choice, small),))
    lines = printed(made, capsys)
    assert row(lines, "total") == ["30 GB", "█" * 24]  # to the scale of what is over
    assert row(lines, "does not fit by") == [size(-made.forecast.headroom)]
    assert "What fits, cheapest first, each compiled:" in lines
    wanted = "remat: true (an option of the model), "
    wanted += '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
    assert row(lines, wanted)[0] == "8 GB"
    assert row(lines, wanted)[2:] == ["1 GB", "3 s"]
    (remedy,) = json.loads(json.dumps(as_json(values(made))))["remedies"]
    assert remedy["set"] == [
        "remat: true (an option of the model)",
        '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    ]
    assert remedy["choice"] == dataclasses.asdict(choice)
    assert (remedy["peak"], remedy["seconds"]) == (8 * GB, 3.0)
    assert not values(made)["fits"]


@pytest.mark.parametrize(
    ("share", "kind", "fraction"),
    [(0.74, "h100", None), (0.901, "h100", 0.91), (0.99, "h100", None), (0.8, "v5p", None)],
)
def test_the_fraction_that_jax_is_to_take(
    share: float, kind: str, fraction: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"activations": int(share * rates(kind).memory)}
    made = planned(forecast(cost(memory=memory), kind=kind))
    assert values(made)["mem_fraction"] == fraction
    said = [s for s in printed(made, capsys) if "XLA_PYTHON_CLIENT_MEM_FRACTION" in s]
    assert [s.rpartition("=")[2] for s in said] == ([f"{fraction:.2f}"] if fraction else [])
