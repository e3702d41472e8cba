"""Keys that nobody knows: which is meant, which letter is foreign, and that many take no time."""

import sys

import pytest

from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.explain import explain


def problems(config, **more):
    with pytest.raises(ConfigError) as caught:
        load(config, **more)
    return caught.value.problems


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"": 1}, '""'),
        ({" ": {}}, '" "'),
        ({"bf16": {"": 1}}, 'bf16.""'),
        ({"zero_optimization": {"offload_param": {"": 1}}}, 'zero_optimization.offload_param.""'),
    ],
)
def test_a_key_without_a_name(config, path):
    says = f"{path}: a key without a name; take it out, or give it its name"
    assert problems(config) == (says,)
    row = explain(config).rows[0]
    assert (row.key, row.became) == (path, "wrong")


def test_a_parameter_without_a_name():
    (problem,) = problems({"optimizer": {"type": "Adam", "params": {"": 1}}})
    assert problem.startswith('optimizer.params."": unknown parameter of Adam; known: lr')


@pytest.mark.parametrize(
    ("config", "guess", "letter"),
    [
        ({"bf16": {"en\u0430bled": True}}, "bf16.enabled", "CYRILLIC SMALL LETTER A, U+0430"),
        ({"\u0441omet": 1}, "comet", "CYRILLIC SMALL LETTER ES, U+0441"),
        ({"zero_\u03bfptimization": {}}, "zero_optimization", "GREEK SMALL LETTER OMICRON"),
        ({"fp16\u200b": {}}, "fp16", "there is an invisible ZERO WIDTH SPACE, U+200B"),
        ({"\uff42f16": {}}, "bf16", "FULLWIDTH LATIN SMALL LETTER B, U+FF42"),
        ({"optimizer": {"type": "Adam", "params": {"l\u0433": 1}}}, "lr", "LETTER GHE, U+0433"),
        ({"optimizer": {"type": "\u0410dam"}}, "Adam", "CYRILLIC CAPITAL LETTER A, U+0410"),
    ],
)
def test_a_letter_of_another_alphabet_is_named(config, guess, letter):
    (problem,) = problems(config)
    assert f"did you mean `{guess}`?" in problem or f'did you mean "{guess}"?' in problem
    assert letter in problem


def test_a_foreign_letter_in_a_keyword():
    for keywords in ({"st\u0430ge": 3}, {"csv_monitor": {"job_n\u0430me": "x"}}):
        with pytest.raises(ConfigError, match="CYRILLIC SMALL LETTER A"):
            ZeroConfig.from_keywords(**keywords)


def test_a_word_of_another_language_has_no_guess():
    (problem,) = problems({"\u0441\u0442\u0430\u0434\u0438\u044f": 3})
    assert "unknown key; take it out (" in problem


def test_a_dotted_key_is_to_be_nested():
    for value in (3, "auto"):
        assert problems({"zero_optimization.stage": value}) == (
            '"zero_optimization.stage": sections are objects; write '
            '{"zero_optimization": {"stage": ...}}',
        )
    assert not load({}).stage


MANY = {f"k{i}": i for i in range(100_000)}


@pytest.mark.parametrize(
    "config",
    [
        MANY,
        {"fp16": MANY},
        dict.fromkeys(MANY, "auto"),
        {"optimizer": {"type": "Adam", "params": MANY}},
    ],
    ids=["top", "section", "auto", "params"],
)
def test_many_unknown_keys_are_told_by_their_number(config):
    found = problems(config)
    assert len(found) == 21
    assert found[-1].endswith("; and 99979 more like it")
    assert all("k" in problem.partition(":")[0] for problem in found)


@pytest.mark.parametrize("place", [lambda many: many, lambda many: {"fp16": many}])
def test_twice_as_many_unknown_keys_take_twice_the_work(place):
    few, many = (calls(place({f"k{i}": i for i in range(n)})) for n in (2000, 4000))
    assert many < 2.2 * few


def calls(config):
    """Of Python functions, until the problems of a config are found."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code) if event == "call" else None)
    try:
        problems(config)
    finally:
        sys.setprofile(None)
    return len(names)


def test_many_stand_ins_are_told_by_their_number():
    found = problems({"bf16": {"enabled": "auto"}}, auto=MANY)
    assert len(found) == 21


def test_a_row_for_each_of_many():
    rows, found = explain({f"k{i}": i for i in range(100)})
    assert [row.became for row in rows[:100]] == ["wrong"] * 100
    assert len(found) == 21


def test_many_keys_that_stand_twice(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("{" + ", ".join(f'"k{i % 20_000}": 1' for i in range(40_000)) + "}")
    assert "k0: stands there more than once" in str(problems(path)[0])


def test_a_long_key_is_cut():
    (problem,) = problems({"x" * 100_000: 1})
    assert len(problem) < 200
