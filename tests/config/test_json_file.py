"""Files that are not JSON but HJSON, as DeepSpeed reads them: comments, commas, bare words."""

import pytest

from zerojax.config import ConfigError, load
from zerojax.config.files import read_file

COMMENTED = """{
  // the stage
  "zero_optimization": {
    "stage": 2,  # gradients too
    "reduce_bucket_size": 5e8, /* left to
       XLA */
    "allgather_bucket_size": 1e9,
  },
  "fp16": {"enabled": "true", "loss_scale": 0, "initial_scale_power": 15},
  "bf16": {
    "enabled": false // or true on newer devices
  },
  "train_batch_size": "auto",
  "csv_monitor": {"enabled": "false", "output_path": "http://a//b # c"},
}
"""
BARE = """# without quotes or braces
train_batch_size: 64
bf16: {
  enabled: True
}
zero_optimization: {stage: 3, overlap_comm: true}
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "c.json"
        path.write_text(text)
        return path

    return write


def test_comments_and_trailing_commas(file):
    config = load(file(COMMENTED))
    assert (config.stage, config.fp16, config.bf16) == (2, True, False)
    assert config.initial_scale_power == 15
    assert config.csv_monitor is None
    raw = read_file(file(COMMENTED))
    assert raw["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert raw["zero_optimization"]["allgather_bucket_size"] == 1_000_000_000
    assert raw["csv_monitor"]["output_path"] == "http://a//b # c"


def test_bare_words(file):
    config = load(file(BARE))
    assert (config.stage, config.bf16, config.train_batch_size) == (3, True, 64)


def test_a_key_that_stands_twice(file):
    text = '{"bf16": {"enabled": true, // yes\n "enabled": false}}'
    with pytest.raises(ConfigError, match=r"bf16\.enabled: is set twice"):
        load(file(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 3 "b": 4}', "not valid JSON at line 1, column 9: Expecting ',' delimiter (and no"),
        ('{"gradient_clipping": 1e999 // much\n}', "not a usable HJSON file"),
        ('{"gradient_clipping": NaN // c\n}', "NaN is not a number in JSON; write a finite one"),
    ],
)
def test_what_is_neither(file, text, says):
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize("value", ["True", "false"])
def test_true_and_false_in_quotes(value):
    means = value.lower() == "true"
    assert load({"fp16": {"enabled": value}}).fp16 is means
    assert (load({"csv_monitor": {"enabled": value}}).csv_monitor is not None) is means
    note = {n.key: n for n in load({"bf16": {"enabled": value}}).notes}["bf16.enabled"]
    assert note.holds is means
    adam = {"type": "Adam", "params": {"adam_w_mode": value}}
    assert load({"optimizer": adam}).optimizer.params["adam_w_mode"] is means
    beside = {"zero_optimization": {"stage": 2, "cpu_offload": value}}
    assert (load(beside).offload_optimizer is not None) is means
