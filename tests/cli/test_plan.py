"""`zerojax plan`: from options to an exit status, on devices that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import app
from zerojax.cli.problem import explain_error

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`named` is a name, as a package would add it."""
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[zerojax.models]\nnamed-model = mine:sound\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "zero.json"
    zero = {"stage": 0, "stage3_param_persistence_threshold": 0}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    path.write_text(json.dumps({"zero_optimization": zero, **batch}))
    return path


def run(config: Path, *args: Any, model: str = "mine:sound", devices: str = "h100:8") -> Any:
    given = ["--model", model, "--config", config, "--devices", devices, "--seq", 16, *args]
    return CliRunner().invoke(app, ["plan", *map(str, given)], env={"COLUMNS": "1000"})


def refused(result: Any) -> str:
    """What is said on stderr of input that will not do."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.slow
def test_a_step_that_fits_and_then_does_not(config: Path, on_cpus: Any) -> None:
    result = run(config, "--batch", 16, "--json", model="named-model")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert result.stderr == ""
    assert told["fits"]
    assert (told["model"], told["rows"], told["seq"]) == ("named-model", 16, 16)
    assert told["choice"] == {
        "stage": 0, "micro": 2, "accumulation": 1, "remat": True, "offload": "none", "live": 0,
        "pipeline": 1,
    }  # fmt: skip
    peak = told["peak"]
    assert peak == sum(told["memory"].values()) > 4 * told["parameters"]
    assert told["tokens"] == 16 * 16
    assert [each["kind"] for each in told["traffic"]] == ["all-reduce"]
    assert told["remedies"] is None

    on_cpus(peak - 1)
    result = run(config, "--batch", 16)
    assert result.exit_code == 3, result.output
    assert " does not fit by " in result.stdout
    assert '"zero_optimization": {"stage": 1} ' in result.stdout


@pytest.mark.parametrize("look", [True, False])
def test_nothing_fits(config: Path, on_cpus: Any, look: bool) -> None:
    on_cpus(100)
    result = run(config, f"--{'' if look else 'no-'}remedies", "--json", model="mine:plain")
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout)["remedies"] == ([] if look else None)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpus")
def test_axes_of_the_mesh(config: Path) -> None:
    """A model that "model" cuts is planned on pairs of devices, another one is refused."""
    pairs = ("--mesh", "data=4,model=2", "--batch", 8)
    result = run(config, *pairs, "--json", model="mine:cut")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["mesh"], told["rows"]) == ({"data": 4, "model": 2}, 8)
    assert told["choice"]["micro"] == 2
    result = run(config, *pairs, model="mine:cut")
    assert "8 x h100 (data 4, model 2)" in result.stdout
    assert "batch 8 = 2 x 1 x 4" in result.stdout
    said = refused(run(config, *pairs))
    assert "no parameter is sharded over the mesh axis 'model'" in said
    assert "axes data=3 multiply out to 3" in refused(run(config, "--mesh", "data=3"))


def test_a_model_that_is_not_there(config: Path) -> None:
    says = "unknown model 'nameb-model'. Did you mean 'named-model'? Known: "
    assert says in refused(run(config, model="nameb-model"))


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize(
    ("model", "error", "line"),
    [
        (
            "narrow",
            "Model fails on tokens int32[1, 16]:\nTypeError: dot_general requires contracting "
            "dimensions to have the same shape, got (16,) and (15,).",
            "in layer\n    return nn.relu(nn.Dense(16)(x @ jnp.ones((self.width, 16))))\n",
        ),
        (
            "raises",
            "model 'mine:raises' cannot be planned:\nKeyError: 'no such thing'\n  File ",
            'in raises\n    raise KeyError("no such thing")\n',
        ),
    ],
    ids=["in the model", "before it"],
)
def test_the_users_own_errors(config: Path, model: str, error: str, line: str) -> None:
    """Their type, their text, and the line of theirs that they come from."""
    said = refused(run(config, model=f"mine:{model}"))
    assert said.startswith(error)
    assert str(HERE / "mine.py") in said
    assert said.endswith(line)


@pytest.mark.usefixtures("on_cpus")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("CNN", "CNN fails on tokens int32[1, 16]:\n"),
        ("nnx_cnn", "Conv fails on tokens int32[8, 16]:\n"),
    ],
)
def test_a_model_that_predicts_no_tokens(config: Path, model: str, says: str) -> None:
    """The message says what is wanted, and names the workload for others."""
    said = refused(run(config, model=f"mine:{model}"))
    assert says in said
    assert "A bare model is taken as a language model: tokens int32 [B, T] -> logits" in said
    assert "returns zerojax.Workload(create_state, train_step, batch)" in said


def test_xlas_own_errors() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: no tile\n\nSuspected Python Code Location:\n  x")
    assert explain_error(error, "model 'a:b' cannot be planned") == (
        "model 'a:b' cannot be planned: XLA does not compile it. Another version of jax may, or "
        "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false.\nINTERNAL: no tile"
    )
    overflow = "overflow in static extent product: dimensions=[8, 1000000000]"
    assert explain_error(RuntimeError(f"Bad StatusOr access: {overflow}"), "model") == (
        "model: an array of dimensions=[8, 1000000000] is larger than XLA allows: pass fewer "
        "tokens or rows"
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--remat-policy", "dots"],
            "--remat-policy: model 'mine:plain' takes no `remat` and `remat_policy`",
        ),
        (["--attention", "plain"], "--attention: model 'mine:plain' takes no `attention`"),
        (["--picture", "a.pdf"], "--picture a.pdf: name a file that ends in .png or .svg"),
        (["--network", "fast"], "network 'fast': write 400gb"),
    ],
)
def test_options_that_will_not_do(config: Path, args: list[Any], says: str) -> None:
    assert says in refused(run(config, *args, model="mine:plain"))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpus")
def test_the_attention_and_what_blocks_keep_are_named(config: Path) -> None:
    policy = ["--remat-policy", "names:c_fc"]
    result = run(config, *policy, "--attention", "plain", "--json", model="mini")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["attention"], found["choice"]["remat"]) == ("plain", "names:c_fc")
    said = refused(run(config, "--attention", "flash", model="mini"))
    assert "'flash' is unknown; there are auto, mosaic_gpu, cudnn, plain" in said
    assert "exclude each other" in refused(run(config, *policy, "--no-remat", model="mini"))
    said = refused(run(config, "--remat-policy", "dot", model="mini"))
    assert "no remat policy 'dot'; did you mean 'dots'?" in said


@pytest.mark.usefixtures("on_cpus")
def test_configs_that_will_not_do(config: Path) -> None:
    assert "train_batch_size 8 or 16" in refused(run(config, "--batch", 12))
    assert "no such file" in refused(run(config.with_name("none.json")))
    config.write_text('{"zero_optimisation": {}}')
    assert "did you mean `zero_optimization`?" in refused(run(config))


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_the_module_runs(config: Path) -> None:
    """Without a GPU, and with nothing but the tables on stdout and nothing on stderr."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {"COLUMNS": "1000", "PYTHONPATH": str(HERE), "JAX_PLATFORMS": "tpu"}
    command = ["--model", "mine:sound", "--config", str(config), "--devices", "h100:8"]
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "plan", *command, "--seq", "16", "--no-remat"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment | {"PYTHONIOENCODING": "utf-8"},
        cwd=Path(zerojax.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].endswith(" parameters, " + str(config) + ", 8 x h100")
    assert lines[1].startswith("stage 0, no remat, batch 8 = 1 x 1 x 8 ")
    first = [line.split()[0] for line in lines if line.split()]
    assert {"parameters", "gradients", "total", "headroom", "all-reduce", "predicted"} <= {*first}
