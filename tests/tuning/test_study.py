"""A small model's step compiled for GPUs, under several settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax.config import ConfigError, load
from zerojax.devices.rates import RESERVE
from zerojax.foresight.attribution import (
    ACTIVATIONS,
    BATCH,
    GATHERED,
    GRADIENTS,
    LOGITS,
    PARAMETERS,
    STATE,
)
from zerojax.foresight.choice import LIVE, OFFLOADS, TRIED, Choice, Offload, changes
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.remedies import milder_first
from zerojax.tuning.cache import Cache
from zerojax.tuning.space import Space, left_open
from zerojax.tuning.study import Study

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("kept", "require_gpu_compiler")]
DIM, VOCABULARY, SEQ, LAYERS = 256, 2048, 64, 2
PARAMETERS_HELD = DIM * VOCABULARY + LAYERS * DIM * DIM * 8


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        narrow = checkpoint_name(jnp.sin(x), "narrow")
        wide = checkpoint_name(nn.Dense(4 * DIM, use_bias=False)(narrow), "wide")
        return x + nn.Dense(DIM, use_bias=False)(jnp.sin(wide))


class Model(nn.Module):
    remat: bool
    policy: str | None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(VOCABULARY, DIM)
        x = table(tokens)
        policy = zerojax.remat_policy(self.policy) if self.policy else None
        block = nn.remat(Layer, policy=policy) if self.remat else Layer
        for i in range(LAYERS):
            x = block(name=f"layer_{i}")(x)
        return table.attend(x)


def model(remat: bool = False, remat_policy: str | None = None) -> Model:
    return Model(remat, remat_policy)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A program of several tests is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("measured")))
        yield


CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}


@functools.cache
def study(rows: int | None = 16, memory: int | None = None, cache: Cache | None = None) -> Study:
    mesh, rates = parse_devices("h100:2")
    if memory is not None:
        rates = dataclasses.replace(rates, memory=memory + RESERVE)
    config, measured = load(CONFIG), cache or Cache()
    return Study(model, config, mesh, rates, rows=rows, seq=SEQ, remat=False, measured=measured)


@pytest.mark.slow
def test_the_kinds_add_up_and_are_those_of_the_stage() -> None:
    of = study()
    whole = of.forecast(of.given).peak.memory
    assert PARAMETERS_HELD * 4 <= whole[PARAMETERS] <= PARAMETERS_HELD * 6.1
    assert whole[STATE] == pytest.approx(PARAMETERS_HELD * 8, rel=1e-3)
    assert GATHERED not in whole
    assert whole[ACTIVATIONS] + whole[LOGITS] + whole.get(GRADIENTS, 0) > 8 * SEQ * VOCABULARY * 2
    assert whole[BATCH] == 8 * (SEQ + 1) * 4
    cut = of.forecast(dataclasses.replace(of.given, stage=3)).peak.memory
    assert cut[STATE] == pytest.approx(PARAMETERS_HELD * 4, rel=0.02)
    assert cut[PARAMETERS] <= PARAMETERS_HELD * 3.1


def test_names_are_those_of_values_that_blocks_compute_again() -> None:
    def names(remat: bool | str) -> list[str]:
        return [*study().names(dataclasses.replace(study().given, remat=remat))]

    assert names(True) == ["narrow", "wide"]
    assert names("names:wide") == ["narrow"]
    assert names(False) == []


def test_pipeline_stages_of_hosts() -> None:
    mesh, rates = parse_devices("h100:32")
    of = Study(model, load(CONFIG), mesh, rates, rows=32, seq=SEQ, remat=False)
    assert (of.pipelines, study().pipelines) == ([2, 4], [])
    choice = dataclasses.replace(of.given, pipeline=4, accumulation=4)
    plan = of.plan(choice)
    assert dict(plan.mesh.shape) == {"stage": 4, "data": 8}
    with pytest.raises(ValueError, match="no loop over layers"):
        of.forecast(choice)
    assert of.tried(choice) is None


def test_milder_choices_keep_the_batch() -> None:
    given = Choice(stage=1, micro=4, accumulation=2, remat=False)
    found = list(milder_first(given))
    assert all(each.micro * each.accumulation == 8 for each in found)
    assert all(each.stage >= 1 and each.possible for each in found)
    assert given not in found
    assert list(changes(given, found[0])) == ['"zero_optimization": {"stage": 2}']


def test_blocks_that_keep_products_are_milder_than_remat() -> None:
    given = Choice(stage=3, micro=4, remat=False)
    first, *others = milder_first(given, policies=["dots_no_batch"])
    assert first == dataclasses.replace(given, remat="dots_no_batch")
    assert {each.remat for each in others} == {False, "dots_no_batch", True}
    for remat, after in (("dots", {"dots", True}), (True, {True}), (None, {None})):
        found = milder_first(dataclasses.replace(given, remat=remat), policies=["dots_no_batch"])
        assert {each.remat for each in found} == after


def test_a_choice_as_json() -> None:
    raw = {"zero_optimization": {"stage": 1, "sub_group_size": 7}, "fp16": {"enabled": True}}
    choice = Choice(stage=3, micro=2, accumulation=4, offload="optimizer and parameters")
    made = choice.json(raw, 8)
    assert made["train_batch_size"] == 64
    assert made["zero_optimization"] == {
        "stage": 3,
        "sub_group_size": 7,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert Choice.of(load(made), 64, 8) == choice
    back = dataclasses.replace(choice, offload="none").json(made, 8)
    assert back["zero_optimization"] == {"stage": 3, "sub_group_size": 7}


def test_what_stays_gathered_is_a_choice_at_stage_3_alone() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 5}
    choice = Choice(stage=3, micro=2, live=5)
    assert Choice.of(load({"zero_optimization": zero}), 16, 8) == choice
    assert choice.json({}, 8)["zero_optimization"] == zero
    assert "5 elements gathered" in str(choice)
    assert dataclasses.replace(choice, stage=2).live == 0
    assert dataclasses.replace(choice, offload="optimizer and parameters").live == 0
    none = dataclasses.replace(choice, live=0)
    assert none.json({"zero_optimization": zero}, 8)["zero_optimization"] == {**zero, LIVE: 0}
    assert next(milder_first(choice)) == none
    assert list(changes(choice, none)) == [f'"zero_optimization": {{"{LIVE}": 0}}']
    assert none not in milder_first(choice, stays=False)
    for given, live in ((5, 5), ("auto", None), (None, None)):
        space, rest = left_open({"zero_optimization": {"stage": 3, LIVE: given}}, 8, 8, [None])
        assert space.live == live
        assert (LIVE in rest["zero_optimization"]) == (live is not None)
    assert {each.live for each in Space(live=5, stages=(2, 3)).modes()} == {0, 5}
    with pytest.raises(ConfigError, match="stage3_max_live_parameters: expected"):
        left_open({"zero_optimization": {LIVE: "much"}}, 8, 8, [None])


def test_what_a_config_gives_is_kept() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": "auto", "offload_param": {"device": "none"}},
        "fp16": {"enabled": True},
    }
    space, rest = left_open(config, None, 8, [False, True])
    assert space.batches.sizes() == [4]
    assert space.stages == (0, 1, 2, 3)
    assert space.offloads == ("none", "optimizer")
    assert rest == {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"offload_param": {"device": "none"}},
        "fp16": {"enabled": True},
    }
    fixed, _ = left_open({"gradient_accumulation_steps": 4}, 64, 8, [None])
    assert fixed.batches.sizes() == [2]
    assert fixed.batches.choice(Choice(stage=1, micro=1), 2).accumulation == 4
    assert left_open({}, 48, 8, [None])[0].batches.sizes() == [1, 2, 3, 6]
    with pytest.raises(ConfigError, match="write 8 or 16"):
        left_open({}, 12, 8, [None])
    with pytest.raises(ConfigError, match="64 in the config, 32 asked"):
        left_open({"train_batch_size": 64}, 32, 8, [None])


def test_an_offload_that_is_auto_is_open() -> None:
    whole = {"zero_optimization": {"offload_optimizer": "auto"}}
    device = {"zero_optimization": {"offload_optimizer": {"device": "auto", "ratio": 0.5}}}
    for config in (whole, device):
        space, rest = left_open(config, 8, 8, [None])
        assert space.offloads == TRIED
        read = load(space.furthest(rest, 8)).offload_optimizer
        assert read is not None
        assert read.ratio == (1.0 if config is whole else 0.5)
    choice = Choice(stage=1, micro=1, offload="optimizer")
    section = choice.json(rest, 8)["zero_optimization"]["offload_optimizer"]
    assert section == {"device": "cpu", "ratio": 0.5}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_every_offload_is_told_and_given_back(offload: Offload) -> None:
    choice = Choice(stage=3, micro=2, offload=offload)
    assert Choice.of(load(choice.json({}, 8)), 16, 8) == choice
    assert Choice.of(choice.config(load({}), 8), 16, 8) == choice


@pytest.mark.slow
def test_parameters_on_disk_can_be_planned() -> None:
    mesh, rates = parse_devices("h100:2")
    place = {"device": "nvme", "nvme_path": "/not/here"}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    config = load({"bf16": {"enabled": True}, "zero_optimization": zero})
    found = Study(model, config, mesh, rates, rows=2, seq=SEQ).forecast
    assert found(Choice.of(config, 2, 2, False)).disk_bytes >= PARAMETERS_HELD * 8 / 2


@pytest.mark.parametrize("devices", ["h100:", "8", "h100:8x", "v5e:16x16", "h100:0"])
def test_devices_that_are_none(devices: str) -> None:
    with pytest.raises(ValueError, match="devices"):
        parse_devices(devices)
