"""Elasticity: DeepSpeed's batches and numbers of devices, and what cannot be."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.config import ConfigError, Elasticity, ZeroConfig, load
from zerojax.config.elasticity import ElasticBatch, elastic_batch
from zerojax.config.explain import explain
from zerojax.config.keys import KEYS

WIDE = {
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
}
SMALL = {"max_train_batch_size": 50, "micro_batch_sizes": [2, 4], "max_gpus": 8}
NODES = {
    "max_train_batch_size": 2000,
    "micro_batch_sizes": [2, 4, 6],
    "num_gpus_per_node": 8,
    "max_gpus": 64,
}


def of(given, **more):
    return {"elasticity": {"enabled": True, **given, **more}}


# Batch, numbers of data-parallel devices, and the micro-batch on one of them: what DeepSpeed
# 0.19.7 computes; the first and the third also stand in its own tests.
@pytest.mark.parametrize(
    ("given", "train", "devices", "world", "micro"),
    [
        (
            WIDE | {"version": 0.1},
            9792,
            (
                *(32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306),
                *(408, 576, 612, 816, 1224),
            ),
            64,
            17,
        ),
        (SMALL, 48, (1, 2, 3, 4, 6, 8), 6, 4),
        (
            {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "max_gpus": 1500},
            24,
            (1, 2, 3, 4, 6, 8, 12, 24),
            4,
            3,
        ),
        (
            {"max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12]},
            96,
            (1, 2, 3, 4, 6, 8, 12),
            4,
            12,
        ),
        (NODES, 1920, (8, 16, 24, 32, 40, 48, 64), 16, 6),
        (NODES | {"model_parallel_size": 4}, 1920, (2, 4, 6, 8, 10, 12, 16), 4, 6),
        (
            {
                "max_train_batch_size": 64,
                "micro_batch_sizes": [4, 8],
                "num_gpus_per_node": 8,
                "min_gpus": 16,
                "max_gpus": 16,
            },
            64,
            (16,),
            16,
            4,
        ),
        ({"max_train_batch_size": 7, "micro_batch_sizes": [2, 3]}, 6, (1, 2, 3), 1, 3),
        ({"max_train_batch_size": 9, "micro_batch_sizes": [4, 9]}, 8, (1, 2), 2, 4),
    ],
)
def test_what_deepspeed_computes(given, train, devices, world, micro):
    config = load(of(given))
    assert config.elasticity.batch == (train, devices)
    assert config.batch(world) == (train, micro, train // world // micro)


def test_of_two_batches_for_as_many_devices():
    section = {"max_train_batch_size": 9, "micro_batch_sizes": [4, 9], "max_gpus": 1}
    assert Elasticity(**section).batch == (9, (1,))
    assert Elasticity(**section, prefer_larger_batch=False).batch == (8, (1,))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 300),
    st.integers(1, 6),
    st.integers(0, 40),
    st.booleans(),
)
def test_every_number_shares_the_batch_and_no_other_does(micros, more, fewest, further, larger):
    largest, most = max(micros) + more, fewest + further
    train, devices = elastic_batch(largest, micros, fewest, most, larger)
    assert train <= largest
    sharing = [n for n in range(fewest, most + 1) if any(train % (n * m) == 0 for m in micros)]
    assert list(devices) == sharing


@given(st.sampled_from(Elasticity(**WIDE).batch.devices))
def test_the_batch_is_the_same_on_every_number(world):
    train, micro, accumulation = ZeroConfig(elasticity=Elasticity(**WIDE)).batch(world)
    assert train == 9792 == micro * accumulation * world
    assert micro in WIDE["micro_batch_sizes"]


@pytest.mark.parametrize(
    ("world", "near"), [(128, "102 or 136"), (31, "32"), (1225, "1224"), (0, "32")]
)
def test_another_number_is_refused_with_the_nearest(world, near):
    with pytest.raises(ConfigError, match=rf"9792 rows is not for {world} data-.* take {near}, as"):
        load(of(WIDE)).batch(world)


def test_advice_counts_the_devices_of_all_pipeline_stages():
    batch = ElasticBatch(48, (4, 6, 8, 12))
    with pytest.raises(ConfigError, match=r"not for 10 .* in 2 pipeline stages; take 8 or 12, as"):
        batch.sizes([1, 2, 4], 5, stages=2)
    with pytest.raises(ConfigError, match=r"not for 20 .* take fewer stages"):
        batch.sizes([1, 2, 4], 4, stages=5)
    assert batch.sizes([1, 2, 4], 6, stages=2) == batch.sizes([1, 2, 4], 6)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "elasticity.max_train_batch_size: missing; write an integer from 1"),
        ({"max_train_batch_size": 8}, "elasticity.micro_batch_sizes: missing; write a list of"),
        (SMALL | {"max_train_batch_size": 0}, "max_train_batch_size: expected an integer"),
        (SMALL | {"max_train_batch_size": "auto"}, "write 2000, or pass it"),
        (SMALL | {"micro_batch_sizes": 5}, "micro_batch_sizes: expected a list of at most 64"),
        (SMALL | {"micro_batch_sizes": []}, "micro_batch_sizes: expected a list"),
        (SMALL | {"micro_batch_sizes": [2, 0.5]}, "micro_batch_sizes: expected a list"),
        (SMALL | {"micro_batch_sizes": [1, -1]}, "got [1, -1]"),
        (SMALL | {"micro_batch_sizes": ["a", None]}, "micro_batch_sizes: expected a list"),
        (SMALL | {"min_gpus": -1}, "min_gpus: expected an integer of at least 1, got -1"),
        (SMALL | {"max_gpus": 0}, "max_gpus: expected an integer of at least 1, got 0"),
        (SMALL | {"min_gpus": 9}, "min_gpus = 9 is above max_gpus = 8; lower it"),
        (SMALL | {"min_gpus": 7, "max_gpus": 7}, "no number of devices from 7 to 7 shares"),
        (SMALL | {"version": 0.3}, "version: expected 0.1 or 0.2, got 0.3"),
        (SMALL | {"micro_batch_sizes": [51]}, "51 is above max_train_batch_size = 50; raise it"),
        (NODES | {"micro_batch_sizes": [251]}, "max_train_batch_size = 2000 / 8 data-parallel"),
        (NODES | {"version": 0.1}, "num_gpus_per_node: version 0.1 knows no nodes; set version"),
        (SMALL | {"version": 0.1, "model_parallel_size": 2}, "take model_parallel_size out"),
        (NODES | {"model_parallel_size": 16}, "= 8 is no multiple of model_parallel_size = 16"),
        (NODES | {"max_gpus": 4}, "max_gpus = 4 is less than a node, num_gpus_per_node = 8"),
        (SMALL | {"micro_batch_size": [2]}, "did you mean `elasticity.micro_batch_sizes`?"),
    ],
)
def test_what_cannot_be(section, says):
    with pytest.raises(ConfigError) as caught:
        load(of(section))
    assert says in str(caught.value)
    assert all(problem.startswith("elasticity.") for problem in caught.value.problems)
    if "auto" not in says and "min_time" not in section:
        with pytest.raises(ConfigError):
            ZeroConfig.from_keywords(elasticity=section)


def test_a_wrong_value_is_not_missing_too():
    with pytest.raises(ConfigError) as caught:
        load(of(SMALL, micro_batch_sizes=5))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "key",
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"],
)
def test_other_batch_sizes_are_refused_or_have_no_effect(key):
    with pytest.raises(ConfigError, match=f"^{key}: elasticity sets the batch sizes.* take it out"):
        load(of(SMALL) | {key: 3})
    config = load(of(SMALL, ignore_non_elastic_batch_info=True) | {key: 3})
    assert config.batch(8) == (48, 2, 3)
    notes = {note.key: note for note in config.notes}
    assert notes[key][1:5] == (3, "no effect", "elasticity sets the batch sizes", None)
    assert load(of(SMALL) | {key: "auto"}).batch(8) == (48, 2, 3)
    typed = dataclasses.replace(config, notes=())
    assert (key, "no effect") in {(note.key, note.status) for note in typed.notes}


def test_a_section_that_is_off_changes_nothing():
    for section in ({}, {"enabled": False}, {"enabled": False, **SMALL}, {"enabled": "auto"}):
        config = load({"elasticity": section, "train_batch_size": 8})
        assert config.elasticity is None
        assert config.batch(8) == (8, 1, 1)
        assert ZeroConfig.from_keywords(elasticity=section | {"enabled": False}) == ZeroConfig()


def test_the_note_follows_the_field():
    config = load(of(SMALL, min_time=20))
    notes = {note.key: note for note in config.notes}
    assert notes["elasticity"].holds == 48
    assert notes["elasticity"].reason == (
        "rows per update, on 1, 2, 3, 4, 6, 8 data-parallel devices"
    )
    assert notes["elasticity.min_time"].status == "no effect"
    without = dataclasses.replace(config, elasticity=None)
    assert "elasticity" not in {note.key for note in without.notes}
    again = dataclasses.replace(without, elasticity=config.elasticity)
    assert [note.key for note in again.notes].count("elasticity") == 1


def test_it_copies_and_hashes():
    config = load(of(WIDE))
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
        assert twin.elasticity.batch.listed().endswith("136, 144, ..., 1224")


def test_the_defaults_are_those_of_the_table():
    for item in dataclasses.fields(Elasticity):
        if item.default is not dataclasses.MISSING:
            assert item.default == KEYS[f"elasticity.{item.name}"].default


def test_explain_has_the_batch_and_with_devices_the_sizes():
    rows = {row.key: row for row in explain(of(SMALL)).rows}
    assert (rows["elasticity"].resolved, rows["elasticity"].became) == (48, "resolved")
    assert "train_batch_size" not in rows
    rows = {row.key: row.resolved for row in explain(of(SMALL), devices=6).rows}
    assert rows["train_batch_size"] == 48
    assert rows["train_micro_batch_size_per_gpu"] == 4
    assert rows["gradient_accumulation_steps"] == 2
    problem = explain(of(SMALL), devices=5).problems
    assert len(problem) == 1
    assert problem[0].startswith("elasticity: a batch of 48 rows is not for 5 data-parallel")
