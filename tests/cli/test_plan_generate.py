"""`zerojax plan --generate`: the forecast of a generation."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.models.bart import SIZES


@pytest.fixture
def on_small_cpus(on_cpus: Any) -> None:
    """Devices with 100 bytes beside the reserve."""
    on_cpus(100)


def run(
    config: Path, *args: Any, model: str = "mini", devices: str = "h100:1", new: int | None = 4
) -> Any:
    given = ["--model", model, "--config", config, "--devices", devices, "--seq", 16, *args]
    given += [] if new is None else ["--generate", new]
    return CliRunner().invoke(app, ["plan", *map(str, given)])


def found(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    (key, value), *others = json.loads(result.stdout).items()
    assert (key, others) == ("generation", [])
    return dict(value)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_gpus(config: Path) -> None:
    one = found(run(config, "--json", model="mine:wide"))
    assert (one["rows"], one["prompt"], one["new"], one["fits"]) == (1, 16, 4, True)
    assert one["weights"] == "gathered"
    assert one["peak"] > one["parameter_bytes"] + one["cache_bytes"]

    config.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    pair = {"devices": "h100:2", "model": "mine:wide"}
    two = found(run(config, "--mesh", "data=1,model=2", "--json", **pair))
    assert one["parameter_bytes"] / 2 < two["parameter_bytes"] < one["parameter_bytes"] * 0.6
    assert two["cache_bytes"] == one["cache_bytes"] / 2
    assert "all-reduce" in {each["kind"] for each in two["token"]["traffic"]}

    everywhere = {"stage3_param_persistence_threshold": 0}
    zero = {"stage": 3, "offload_param": {"device": "cpu"}} | everywhere
    config.write_text(json.dumps({"zero_optimization": zero}))
    result = run(config, "--weights", "by_layer", "--quantize", "int8", **pair)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("generation, 2 rows, prompts of 16 tokens, 4 new ones, h100\n")
    assert "in host memory" in result.stdout
    assert "to the device a token" in result.stdout
    assert result.stdout.endswith("\nfits\n")


@pytest.mark.slow
@pytest.mark.usefixtures("on_small_cpus")
def test_a_generation_that_does_not_fit(config: Path) -> None:
    result = run(config, "--batch", 16, model="mine:cut")
    assert result.exit_code == 3, result.output
    assert result.stdout.startswith("generation, 16 rows")
    assert "\ndoes not fit by " in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("on_small_cpus")
def test_an_encoder_decoder(config: Path) -> None:
    result = run(config, "--json", model="mine:translator")
    assert result.exit_code == 3, "it needs more than 100 bytes"
    planned = json.loads(result.stdout)["generation"]
    assert (planned["rows"], planned["prompt"], planned["new"]) == (8, 16, 4)
    sizes = SIZES["blenderbot-tiny"]
    layers, width = sizes["decoder_layers"], sizes["d_model"]
    # Keys and values of 16 source tokens and of 5 target tokens, each with room for the model's 24
    # positions, in bf16, one row a device.
    assert planned["cache_bytes"] == pytest.approx(2 * layers * width * 2 * (24 + 24), rel=0.05)


@pytest.mark.usefixtures("on_small_cpus")
@pytest.mark.parametrize(
    ("args", "model", "says"),
    [
        ((), "mine:plain", "a Model keeps no keys and values between tokens"),
        (("--attention", "plain"), "mine:cut", "model 'mine:cut' takes no `attention`"),
    ],
)
def test_models_that_cannot_be_planned(
    config: Path, args: tuple[str, ...], model: str, says: str
) -> None:
    result = run(config, *args, model=model)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "new", "says"),
    [
        (["--picture", "a.png"], 4, "--picture has no effect beside --generate: remove it"),
        (["--quantize", "int8"], None, "--quantize has no effect without --generate"),
    ],
)
def test_options_that_will_not_do(
    config: Path, args: list[str], new: int | None, says: str
) -> None:
    result = run(config, *args, new=new)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
