"""Files of `zerojax config`: each loads as what was answered."""

from pathlib import Path

import pytest

from zerojax.cli.config_answers import Answers, to_json, to_yaml
from zerojax.config import load
from zerojax.launch.accelerate import read

NVME = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "nvme", "nvme_path": "/disk"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stage": 0, "precision": "fp16", "clipping": 0.0},
        {"stage": 1, "precision": "bf16", "accumulation": 4, "micro": 2, "devices": 8},
        NVME,
    ],
)
def test_both_files_load_as_answered(given: dict[str, object], tmp_path: Path) -> None:
    answers = Answers(**given)  # type: ignore[arg-type]
    for name, text in (("a.json", to_json(answers)), ("a.yaml", to_yaml(answers))):
        (tmp_path / name).write_text(text)
        config = load(tmp_path / name)
        assert config.stage == answers.stage
        assert (config.compute_dtype or "no") == answers.precision
        assert config.gradient_clipping == answers.clipping
        places = [config.offload_optimizer, config.offload_param]
        assert [place.device if place else "none" for place in places] == [
            answers.offload_optimizer,
            answers.offload_param,
        ]
        assert given != NVME or config.offload_param.nvme_path == "/disk"
        assert config.batch(8).accumulation == answers.accumulation


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lamb", "Lion", "Muon", "SGD"])
def test_an_optimizer(name: str, tmp_path: Path) -> None:
    (tmp_path / "auto.json").write_text(to_json(Answers(optimizer=name)))
    (tmp_path / "half.json").write_text(to_json(Answers(optimizer=name, learning_rate=0.5)))
    auto = load(tmp_path / "auto.json", auto={"optimizer.params.lr": 0.5}).optimizer
    assert auto == load(tmp_path / "half.json").optimizer
    assert (auto.type, auto.params["lr"]) == (name, 0.5)


def test_machines_are_those_of_a_launch(tmp_path: Path) -> None:
    answers = Answers(devices=16, machines=2, rank=1, address="host0", on_cpu=True)
    (tmp_path / "a.yaml").write_text(to_yaml(answers))
    options = read(tmp_path / "a.yaml")
    assert (options.nproc_per_node, options.num_nodes, options.node_rank) == ("8", 2, 1)
    assert options.coordinator == "host0:29500"
    assert options.environ == {"JAX_PLATFORMS": "cpu"}
