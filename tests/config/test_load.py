"""What a JSON or a dict becomes, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from zerojax.config import ConfigError, ZeroConfig, load
from zerojax.config.check import sections
from zerojax.config.keys import KEYS
from zerojax.config.kinds import ValueKind
from zerojax.config.named_types import OPTIMIZERS, SCHEDULERS
from zerojax.config.settings import BY_FIELD

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def accepts(kind: ValueKind, value: object) -> bool:
    try:
        kind.check(value)
    except ConfigError:
        return False
    return True


def refusal(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config)
    text = str(caught.value)
    assert "pydantic" not in text
    return text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_ready_configs_load(path):
    config = load(path)
    stage, _, dtype = path.stem.removeprefix("zero").partition("_")
    assert config.stage == int(stage)
    offload = dtype in ("offload_optimizer", "offload", "nvme")
    assert (config.bf16, config.fp16) == (dtype == "bf16" or offload, dtype == "fp16")
    assert (config.offload_optimizer is not None) == offload
    assert (config.offload_param is not None) == (dtype in ("offload", "nvme"))
    assert config.gradient_clipping == 1.0
    for world in (1, 2, 3, 8):
        assert config.batch(world) == (None, None, 1)


def test_there_are_ready_configs_for_every_stage():
    assert {p.stem for p in CONFIGS} >= {f"zero{s}" for s in range(4)} | {
        f"zero{s}_{dtype}" for s in (2, 3) for dtype in ("bf16", "fp16")
    }


def test_json_defaults_are_deepspeeds_and_are_told():
    config = load({})
    assert (config.stage, config.gradient_clipping, config.steps_per_print) == (0, 1.0, None)
    assert [(n.key, n.value, n.status) for n in config.notes] == [
        ("gradient_clipping", 1.0, "default")
    ]
    assert load({"gradient_clipping": 0}).gradient_clipping == 0.0
    named = load({"optimizer": {"type": "Adam", "params": {}}})
    assert ("optimizer.params.lr", 1e-3) in [(n.key, n.value) for n in named.notes]


def test_bf16_skips_overflow_as_deepspeed_does_and_tells():
    config = load({"bf16": {"enabled": True}})
    assert config.check_grad_overflow
    assert config.skips_overflow
    notes = {note.key: note for note in config.notes}
    note = notes["bf16.check_grad_overflow"]
    assert (note.status, note.holds) == ("default", True)
    assert "false turns it off" in note.reason
    assert not load({"bf16": {"enabled": True, "check_grad_overflow": False}}).skips_overflow
    auto = load({"bf16": {"enabled": True, "check_grad_overflow": "auto"}})
    assert auto == config
    assert [n.status for n in auto.notes if "overflow" in n.key] == ["resolved"]
    # Nothing is said, and nothing asked for, where it would do nothing.
    for other in ({}, {"fp16": {"enabled": True}}, {"bf16": {"enabled": False}}):
        quiet = load(other)
        assert not quiet.check_grad_overflow
        assert not [n for n in quiet.notes if "overflow" in n.key]
    assert not ZeroConfig(bf16=True).skips_overflow


def test_check_finite_is_a_key_of_its_own():
    config = load({"check_finite": True})
    assert config == ZeroConfig(check_finite=True, gradient_clipping=1.0)
    assert config.skips_overflow
    assert {n.key: n.status for n in config.notes}["check_finite"] == "honoured"
    both = load({"check_finite": True, "bf16": {"enabled": True, "check_grad_overflow": True}})
    (note,) = [n for n in both.notes if n.status == "no effect"]
    assert (note.key, note.reason[:12]) == ("bf16.check_grad_overflow", "check_finite")
    fp16 = load({"check_finite": True, "fp16": {"enabled": True}})
    assert {n.key: n.status for n in fp16.notes}["check_finite"] == "no effect"


def nested(path: str, value: object) -> dict[str, object]:
    for name in reversed(path.split(".")):
        value = {name: value}
    if path.startswith("optimizer."):
        value["optimizer"]["type"] = "Adam"
    return value


def test_every_key_is_taken_at_its_default():
    open_ones = {key.path for key in BY_FIELD.values() if key.default is None}
    for path, key in KEYS.items():
        if path in open_ones or path.startswith(("optimizer", "scheduler")):
            continue
        notes = {note.key: note for note in load(nested(path, key.default)).notes}
        assert notes[path].status in ("honoured", "left to XLA", "no effect"), path


def test_every_off_key_is_refused_when_on_and_off_when_auto():
    for path, key in KEYS.items():
        if key.treatment != "off only":
            continue
        candidates = (True, False, "cpu", "fp16", "sum", "1f1b", 2, 7, 0.5, {"a": 1})
        on = next(
            v for v in candidates if accepts(key.kind, v) and v not in (key.default, *key.accepts)
        )
        text = refusal(nested(path, on))
        assert text.startswith(f"{path} = ")
        assert f"not supported: {key.why}" in text
        (note,) = [note for note in load(nested(path, "auto")).notes if note.key == path]
        assert (note.status, note.holds) == ("resolved", key.default)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimisation": {"stage": 3}}, "did you mean `zero_optimization`?"),
        ({"zero_optimization.stage": 3}, "sections are objects; write"),
        ({"stage": 3}, "stage: unknown key here; it belongs at `zero_optimization.stage`"),
        (
            {"pipeline": {"stage": 2}},
            "pipeline.stage: unknown key; did you mean `pipeline.stages`?",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, '"auto" cannot be resolved; write 0'),
        ({"train_batch_size": 0}, "at least 1, got 0"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a finite number of at least 0"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "master weights stay in fp32"),
        ({"data_types": {"grad_accum_dtype": "f32"}}, '"fp32", "bf16", "fp16"'),
        ({"optimizer": {"params": {}}}, "optimizer.type: missing; expected one of Adam"),
        ({"optimizer": {"type": "onebitadam"}}, 'does not compress momenta; write "AdamW"'),
        ({"optimizer": {"type": "ZeroOneAdam"}}, 'write "AdamW", and zero_quantized_gradients for'),
        ({"zero_optimization": {"zeropp_loco_param": {}}}, "write zero_quantized_gradients alone"),
        ({"elasticity": {"enabled": True}}, "write train_batch_size and train_micro_batch_size_"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "use `gradient_clippin"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "AMSGrad is not supported"),
        ([], "expected the path of a JSON file, a mapping or a ZeroConfig"),
        (3, "ZeroConfig, got 3; pass a stage as zerojax.zero(stage=3)"),
    ],
)
def test_bad_config(config, says):
    assert says in refusal(config)


def test_all_problems_at_once_one_a_line():
    with pytest.raises(ConfigError) as caught:
        load({"zero_optimisation": {}, "comet": {"enabled": True}, "train_batch_size": "8"})
    assert len(caught.value.problems) == 3
    assert len(str(caught.value).splitlines()) == 4
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON at line 1, column 1"),
        (b'{"a": ' * 100_000, "not a usable JSON file"),
    ],
)
def test_bad_file(tmp_path, text, says):
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    message = refusal(path)
    assert says in message
    assert str(path) in message


def test_missing_file_and_folder(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.json")
    assert "no such file in" in refusal("surely/not/here.json")
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal("nul\0.json")


def test_the_dict_is_left_alone_and_copied():
    mine = {"bfloat16": {"enabled": "auto"}, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
    before = json.dumps(mine)
    config = load(mine)
    assert json.dumps(mine) == before
    mine["optimizer"]["params"]["lr"] = 2.0
    assert config.optimizer.params["lr"] == 1.0


NAMES = sorted({name for names in sections(KEYS).values() for name in names} | {"stag", "lr", ""})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "x", *OPTIMIZERS, *SCHEDULERS])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5) | st.lists(inner, max_size=2)
    ),
    max_leaves=12,
)
