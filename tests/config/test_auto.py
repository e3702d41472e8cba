"""What stands in for "auto"."""

import pytest

from zerojax.config import ConfigError, SchedulerConfig, ZeroConfig, load

STEPS = "scheduler.params.total_num_steps"
CONFIG = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": 10},
    },
    "bfloat16": {"enabled": "auto"},
    "gradient_clipping": 0.5,
}


def test_a_value_stands_in():
    config = load(CONFIG, auto={STEPS: 300, "bf16.enabled": True})
    assert config.scheduler == SchedulerConfig(
        type="WarmupDecayLR", params={"total_num_steps": 300, "warmup_num_steps": 10}
    )
    assert config.bf16
    notes = {note.key: note for note in config.notes}
    assert notes[STEPS][:3] == (STEPS, "auto", "resolved")
    assert (notes[STEPS].holds, notes["bf16.enabled"].holds) == (300, True)
    assert CONFIG["scheduler"]["params"]["total_num_steps"] == "auto"  # ours is a copy


def test_what_cannot_be_resolved_says_how():
    with pytest.raises(ConfigError) as caught:
        load(CONFIG)
    assert caught.value.problems == (
        f'{STEPS}: "auto" cannot be resolved: only the training loop knows how long it runs; '
        f'write the number, or pass it: auto={{"{STEPS}": ...}}',
    )
    with pytest.raises(
        ConfigError, match=r"write 0, or let `zerojax\.fit` or `python -m zerojax fit`"
    ):
        load({"zero_optimization": {"stage": "auto"}})
    with pytest.raises(ConfigError, match='offload_param: "auto" takes a search'):
        load({"zero_optimization": {"stage": 3, "offload_param": "auto"}})
    assert load({"zero_optimization": {"stage": "auto"}}, auto={"zero_optimization.stage": 2})


@pytest.mark.parametrize(
    ("auto", "says"),
    [
        ({"gradient_clipping": 1.0}, 'auto: "gradient_clipping" is not "auto" in the config'),
        ({"xyzzy": 3}, f'"auto" is at: {STEPS}, bf16.enabled'),
        ({STEPS: -3}, f"{STEPS}: expected an integer of at least 1, got -3"),
    ],
)
def test_bad_stand_ins(auto, says):
    with pytest.raises(ConfigError) as caught:
        load(CONFIG, auto=auto)
    assert says in str(caught.value)


def test_nothing_is_auto_there():
    with pytest.raises(ConfigError, match='nothing in it is "auto"'):
        load({}, auto={"gradient_clipping": 1.0})
    with pytest.raises(ConfigError, match="set its fields"):
        load(ZeroConfig(), auto={"gradient_clipping": 1.0})
    assert load(ZeroConfig(), auto={}) == ZeroConfig()


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR"])
def test_the_peak_of_a_warm_up_is_the_optimizers_rate_where_it_is_auto(name: str) -> None:
    params: dict[str, object] = {"warmup_max_lr": "auto", "warmup_num_steps": 5}
    if name == "WarmupDecayLR":
        params["total_num_steps"] = 50
    config = load({
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "scheduler": {"type": name, "params": params},
    })  # fmt: skip
    assert config.scheduler is not None
    assert config.scheduler.with_defaults()["warmup_max_lr"] is None
    (note,) = [n for n in config.notes if n.key == "scheduler.params.warmup_max_lr"]
    assert (note.status, note.reason) == ("resolved", "the optimizer's learning rate")
