"""Offload: what the sections become, what is refused, and what is told."""

import dataclasses

import pytest

from zerojax.config import ConfigError, OffloadParam, ZeroConfig, load
from zerojax.config.explain import explain
from zerojax.config.sections import OFFLOAD

ZERO = "zero_optimization"
DISK = {"device": "nvme", "nvme_path": "/disk"}


def of(stage=3, **zero):
    return {ZERO: {"stage": stage, **zero}}


def notes(config):
    return {note.key.removeprefix(f"{ZERO}."): note for note in config.notes}


@pytest.mark.parametrize("section", OFFLOAD)
def test_forms_of_a_keyword(section):
    cls = OFFLOAD[section]
    for given in ("cpu", {"device": "cpu"}, {}, cls()):
        config = ZeroConfig.from_keywords(stage=3, **{section: given})
        assert getattr(config, section) == cls()
    for given in ("none", {"device": "none"}, {"device": None, "buffer_count": 8}, None):
        assert ZeroConfig.from_keywords(**{section: given}) == ZeroConfig()
    config = ZeroConfig.from_keywords(stage=3, **{section: DISK | {"buffer_count": 2}})
    assert getattr(config, section) == cls(**DISK, buffer_count=2)


@pytest.mark.parametrize("section", OFFLOAD)
def test_what_is_none_in_a_json(section):
    for given in (None, {}, {"device": None}, {"device": "none"}, {"device": "auto"}):
        assert getattr(load(of(0, **{section: given})), section) is None
        rows, problems = explain(of(0, **{section: given}))
        assert not problems
        assert not [row for row in rows if "not judged" in row.why]


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        (
            of(0, offload_optimizer={"device": "cpu"}),
            'offload_optimizer.device = "cpu" needs stage 1, 2 or 3, where the optimizer state is '
            f"sharded, and the stage is 0; set {ZERO}.stage to 1, or {ZERO}.offload_optimizer.",
        ),
        (
            of(2, offload_param=DISK),
            'offload_param.device = "nvme" needs stage 3, where parameters are sharded, and the '
            f'stage is 2; set {ZERO}.stage to 3, or {ZERO}.offload_param.device to "none"',
        ),
        *(
            (of(offload_param={"device": "nvme", "nvme_path": path}), "offload_param.nvme_path: ")
            for path in (None, "", "auto")
        ),
        (
            of(offload_optimizer={"device": "cpu", "ratio": 0}),
            'offload_optimizer.ratio = 0.0 offloads nothing; set device to "none"',
        ),
        (
            of(offload_optimizer=DISK | {"ratio": 0.5}),
            'offload_optimizer.ratio = 0.5 is for device "cpu"; with "nvme" leave it out',
        ),
        (
            of(cpu_offload=True, offload_optimizer=DISK),
            'cpu_offload = true contradicts zero_optimization.offload_optimizer.device = "n'
            'vme"; remove it',
        ),
    ],
)
def test_what_a_json_cannot_say(zero, says):
    with pytest.raises(ConfigError) as caught:
        load(zero)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{ZERO}.")
    assert says in problem
    rows, problems = explain(zero)
    assert problems == (problem,)
    assert all(row.why in problem for row in rows if row.became in ("wrong", "refused"))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"offload_optimizer": "cpu"}, 'offload_optimizer = "cpu" needs stage 1, 2 or 3'),
        (
            {"stage": 3, "offload_param": "disk"},
            'device: expected one of "none", "cpu", "nvme"',
        ),
        ({"stage": 3, "offload_param": True}, "offload_param: expected OffloadParam, a mapping"),
    ],
)
def test_what_keywords_cannot_say(keywords, says):
    with pytest.raises(ConfigError, match=says):
        ZeroConfig.from_keywords(**keywords)


@pytest.mark.parametrize(
    ("old", "section"),
    [
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ],
)
def test_old_switches(old, section):
    config = load(of(**{old: True}))
    assert config == load(of(**{section: {"device": "cpu"}}))
    assert load(of(**{old: True, section: {"device": "cpu"}})) == config
    assert load(of(**{old: True, section: None})) == config
    assert notes(config)[f"{section}.device"].status == "honoured"
    assert explain(of(**{old: True})).rows[1][1:4] == (True, "cpu", "honoured")
    for off in (False, None, "auto"):
        assert load(of(0, **{old: off})) == load(of(0))


def test_what_has_no_effect_is_noted():
    idle = {"nvme_path": "/disk", "buffer_count": 8}
    config = load(of(offload_param={"device": "cpu", "max_in_cpu": 1e6, **idle}))
    told = notes(config)
    for name in ("nvme_path", "buffer_count", "max_in_cpu"):
        assert told[f"offload_param.{name}"].status == "no effect"
        assert 'the device is "cpu"' in told[f"offload_param.{name}"].reason
    assert told["offload_param.device"].status == "honoured"
    off = notes(load(of(offload_optimizer={"device": "none", "ratio": 0, **idle})))
    for name in ("nvme_path", "buffer_count", "ratio"):
        assert off[f"offload_optimizer.{name}"].reason == "offload_optimizer is off"
    config = ZeroConfig.from_keywords(stage=3, offload_param={"nvme_path": "/disk"})
    (note,) = config.notes
    assert (note.key, note.status) == ("offload_param.nvme_path", "no effect")
    assert dataclasses.replace(config, bf16=True).notes == (note,)
    assert dataclasses.replace(config, offload_param=OffloadParam()).notes == ()


def test_sub_groups():
    told = notes(load(of(sub_group_size=1e9)))["sub_group_size"]
    assert (told.status, told.reason) == ("no effect", "nothing is offloaded")
    config = load(of(sub_group_size=1e9, offload_optimizer={"device": "cpu"}))
    told = notes(config)["sub_group_size"]
    assert (told.status, told.holds) == ("honoured", 1_000_000_000)
    assert "an upper bound" in told.reason
    assert "at most 33,554,432" in told.reason
    (note,) = ZeroConfig(stage=3, sub_group_size=1000).notes
    assert (note.key, note.reason) == ("sub_group_size", "nothing is offloaded")
    assert ZeroConfig(stage=3, sub_group_size=1000, offload_param=OffloadParam()).notes == ()
    assert ZeroConfig(sub_group_size=0) == ZeroConfig()
    assert load(of(sub_group_size="auto")).sub_group_size == 1_000_000_000
