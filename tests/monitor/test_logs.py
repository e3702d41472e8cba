"""A run's logs, from the steps to the files and the lines."""

import logging
import re
import subprocess
import sys
import textwrap
from contextlib import closing

import jax
import jax.numpy as jnp
import pytest

from zerojax.config import ZeroConfig
from zerojax.monitor.after_step import AfterStep


@pytest.fixture
def config(tmp_path):
    def make(**more):
        files = {"output_path": str(tmp_path), "job_name": "job"}
        return ZeroConfig.from_keywords(csv_monitor=files, **more)

    return make


def files(tmp_path):
    found = (tmp_path / "job").glob("*.csv")
    return {path.stem.removeprefix("Train_Samples_"): path.read_text().split() for path in found}


def test_a_few_steps_in_csv(tmp_path, config, report):
    with closing(AfterStep(config(fp16=True))) as reporter:
        reporter.record(report(1, lr=0.5, scale=4.0), {"loss": jnp.bfloat16(0.25), "acc": 1}, 8)
        reporter.record(report(2, lr=0.25, norm=3.0, scale=2.0), {"loss": 0.125, "acc": 0}, 4)
    assert files(tmp_path) == {
        "train_loss": ["step,train_loss", "8,0.25", "12,0.125"],
        "lr": ["step,lr", "8,0.5", "12,0.25"],
        "loss_scale": ["step,loss_scale", "8,4.0", "12,2.0"],
        "grad_norm": ["step,grad_norm", "8,2.0", "12,3.0"],
        "acc": ["step,acc", "8,1.0", "12,0.0"],
    }


def test_further_figures_follow_those_of_all_steps(tmp_path, config, report, slow):
    with closing(AfterStep(config())) as reporter:
        reporter.record(report(1), {"loss": slow(0.5)}, 8)
        assert files(tmp_path) == {}
        reporter.write({"Eval/Samples/eval_loss": 0.25}, 8)
        found = files(tmp_path)
    assert found["train_loss"] == ["step,train_loss", "8,0.5"]
    assert found["Eval_Samples_eval_loss"] == ["step,eval_loss", "8,0.25"]
    AfterStep(ZeroConfig.from_keywords()).write({"Eval/Samples/eval_loss": 0.25}, 8)  # no monitor


def test_a_slow_device_is_not_waited_for(tmp_path, config, report, slow):
    reporter = AfterStep(config(steps_per_print=3))
    losses = [slow(n) for n in (1, 2, 3)]
    for number in (1, 2):
        reporter.record(report(number), {"loss": losses[number - 1]}, 8)
    assert not any(loss.read for loss in losses)
    assert files(tmp_path) == {}
    reporter.record(report(3), {"loss": losses[2]}, 8)  # a line is due: now it waits
    assert files(tmp_path)["train_loss"] == ["step,train_loss", "8,1.0", "16,2.0", "24,3.0"]
    reporter.close()


def test_lines_at_the_right_steps(report, caplog):
    config = ZeroConfig(steps_per_print=2)
    with closing(AfterStep(config)) as reporter:
        for number in range(1, 6):
            reporter.record(report(number, lr=1e-3), jnp.float32(0.5), 8)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("step=2, skipped=0, lr=[0.001], loss=0.5, grad_norm=2, samples/sec=")
    assert second.startswith("step=4, ")
    assert float(first.partition("samples/sec=")[2]) > 0


def test_the_first_line_has_no_pace_that_compilation_spoils(report, caplog):
    with closing(AfterStep(ZeroConfig(steps_per_print=1))) as reporter:
        for number in (1, 2):
            reporter.record(report(number), None, 8)
    assert ["samples/sec" in r.getMessage() for r in caplog.records] == [False, True]


def test_wall_clock_with_lines(report, caplog):
    config = ZeroConfig(steps_per_print=2, wall_clock_breakdown=True)
    with closing(AfterStep(config)) as reporter:
        for number in range(1, 5):
            reporter.check()
            for phase in ("batch", "step"):
                reporter.phase(phase, None)
            reporter.record(report(number), None, 8)
    lines = [record.getMessage() for record in caplog.records]
    times = r"time \(ms\) \| batch: \d+\.\d\d \| step: \d+\.\d\d"
    wanted = [rf"{times} \| first step, compilation included", "step=2,.*", times,
              "step=4,.*", rf"{times} \| mean of 2 steps"]  # fmt: skip
    for want, line in zip(wanted, lines, strict=True):
        assert re.fullmatch(want, line)


def test_only_the_first_process_says_anything(tmp_path, config, report, caplog, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with closing(AfterStep(config(steps_per_print=1))) as reporter:
        reporter.record(report(), None, 8)
    assert not caplog.records
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_nothing_is_lost_when_the_program_ends(tmp_path):
    """Neither the last steps nor, with logging as Python has it, the lines."""
    script = """
        import jax, jax.numpy as jnp
        from zerojax.config import ZeroConfig
        from zerojax.monitor.after_step import AfterStep

        config = ZeroConfig.from_keywords(steps_per_print=2, csv_monitor={"job_name": "job"})
        reporter = AfterStep(config)

        @jax.jit
        def slow(x):  # a fraction of a second, so that the program ends before it
            return jax.lax.fori_loop(0, 300, lambda i, y: jnp.tanh(y @ y), x).mean()

        for step in range(1, 4):
            out = slow(jnp.zeros((300, 300)))
            names = "loss_scale", "skipped_steps", "grad_norm", "learning_rate"
            reporter.record({"step": step} | dict.fromkeys(names, jnp.float32(0)), out, 8)
        raise SystemExit(3)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert files(tmp_path)["train_loss"] == ["step,train_loss", "8,0.0", "16,0.0", "24,0.0"]
    (line,) = done.stderr.splitlines()
    assert "[INFO] [zerojax] step=2, skipped=0, lr=[0], loss=0, grad_norm=0" in line
    assert done.stdout == ""
