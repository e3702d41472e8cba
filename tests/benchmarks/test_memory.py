"""What the stages cost on eight H100s, asserted on the very records that the benchmark prints.

The baseline: the same model and step under plain ``jax.jit`` with sharded state took
1235 MB of arguments and 4124 MB of temporaries.
"""

import functools
from dataclasses import replace

import pytest

import zerojax
from benchmarks.measure import Case, Record, compile_case, lower_zero

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

MB = 1e6
BASELINE = (1235 + 4124) * MB
SCANNED = Case(stage=3, scan=True)


@functools.cache
def record(case: Case) -> Record:
    return compile_case(case)


def at(stage: int) -> Record:
    """The scanned model. Without accumulation stages 1 and 2 are one program, as the first test
    shows."""
    return record(replace(SCANNED, stage=stage))


def lowered(case: Case) -> str:
    return lower_zero(case, zerojax.topology(case.device, case.devices))[0].as_text()


def test_stages_1_and_2_are_one_program_without_accumulation():
    first, second = (lowered(replace(SCANNED, stage=stage)) for stage in (1, 2))
    assert first == second


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resting_bytes_are_12_a_parameter_over_the_devices(stage):
    found = at(stage)
    slack = 0.001 if stage == 0 else 0.02
    assert found.resting_bytes == pytest.approx(found.expected_resting_bytes, rel=slack)


def test_peak_falls_from_stage_to_stage():
    assert at(0).peak_bytes > 1.5 * at(2).peak_bytes
    assert at(2).peak_bytes > 1.1 * at(3).peak_bytes


def test_peak_at_stage_3_is_far_below_the_baseline():
    assert at(3).peak_bytes < 4200 * MB < BASELINE


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_sent_is_near_the_theory(stage):
    found = at(stage)
    more = found.total_moved_bytes / found.total_expected_moved_bytes
    assert 0.9 < more < (1.09 if stage else 1.001)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduce_scattered_of_gathers_in_the_compute_dtype(stage):
    found = at(stage)
    assert set(found.gather_dtypes) == {"bf16"}
    assert found.largest_all_reduce <= 1 * MB
    assert found.all_to_all == 0
    assert found.collective_counts["reduce-scatter"] > 0


def test_no_gathered_parameter_lives_on_to_the_backward_pass_at_stage_3():
    assert at(3).crossing_bytes == 0
    assert at(2).crossing_bytes > 0  # the same measure sees that stage 2 keeps them


def test_the_program_does_not_grow_with_the_devices():
    few, many = (lowered(replace(SCANNED, devices=n)) for n in (8, 64))
    assert many.count("\n") < 1.02 * few.count("\n")


@pytest.mark.parametrize("devices", [24, pytest.param(1000, marks=pytest.mark.sweep)])
def test_a_number_that_divides_no_dimension(devices):
    """GPT-2's vocabulary and width. What is replicated is persistent by the config, 0.5M
    parameters. The tied table, gathered a third time, is a tenth of this shallow model's
    traffic."""
    case = replace(SCANNED, devices=devices, n_layer=4, vocab_size=50257)
    found, persistent = record(case), 20_800 * 4 + 2 * 1600
    held = found.expected_resting_bytes + 12 * persistent
    assert found.resting_bytes == pytest.approx(held, rel=0.05)
    scattered = found.moved_bytes["reduce-scatter"]
    assert scattered <= 1.03 * found.expected_moved_bytes["reduce-scatter"]
    # The table of positions, with the replicated arrays of a layer outside the loop.
    assert found.largest_all_reduce <= 1024 * 1600 * 2 + 20_800 * 2
    # Between hosts first: 3.9 times theory on 1000 devices where neighbours gather first.
    assert sum(found.between_bytes.values()) <= 1.2 * found.expected_between_bytes
