"""Matrices as int8 codes and scales: the tensors, their numbers, the config, what transformers
computes with them, and what is refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from checkpoint import recorded as checkpoints
from models import recorded_folders as recorded
from models.recorded_decoders import inputs

import zerojax
from zerojax.checkpoint import CheckpointError, export
from zerojax.models import from_folder
from zerojax.models.gpt import SIZES, GPTConfig
from zerojax.models.hugging_face import gpt2
from zerojax.models.hugging_face.pretrained import Pretrained
from zerojax.weights import save

CASES = ("llama3", "linear", "qwen3", "phi3")
LOADS = all(map(importlib.util.find_spec, ("torch", "transformers", "compressed_tensors")))

pytestmark = pytest.mark.usefixtures("quick_compile")


def opened(case: str, folder: Path, **fields: Any) -> Pretrained:
    recorded.folder_of(case, folder / "in")
    return from_folder(folder / "in", **fields)


def codes_of(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Returns the codes of a matrix as its element's type in the format says: code + 128."""
    packed = tensors[f"{name}_packed"]
    codes = np.stack([(packed >> shift) & 255 for shift in (0, 8, 16, 24)], axis=-1) - 128
    return codes.reshape(*tensors[f"{name}_shape"])


@pytest.mark.parametrize(("case", "scan"), [("llama3", True), ("phi3", False)])
def test_a_folder_has_codes_and_scales(case: str, scan: bool, tmp_path: Path) -> None:
    loaded = opened(case, tmp_path, scan=scan)
    loaded.save(tmp_path / "out", loaded.parameters, quantize="int8")
    before = recorded.tensors_of(tmp_path / "in/model.safetensors")
    after = recorded.tensors_of(tmp_path / "out/model.safetensors")
    matrices = {name for name, x in before.items() if ".layers." in name and x.ndim == 2}
    others = {name: x for name, x in after.items() if "weight_" not in name}
    assert others.keys() == before.keys() - matrices
    jax.tree.map(np.testing.assert_array_equal, others, {name: before[name] for name in others})
    assert after.keys() - others == {
        f"{name}_{suffix}" for name in matrices for suffix in ("packed", "scale", "shape")
    }
    for name in matrices:
        weight, scale = before[name], after[f"{name}_scale"]
        codes = codes_of(after, name)
        quantized: Any = zerojax.quantize_weights({"w": weight.T}, select=lambda *_: True)["w"]
        np.testing.assert_array_equal(codes, quantized.qvalue.T)
        np.testing.assert_array_equal(scale, quantized.scale.T)
        assert (np.abs(codes * scale - weight) <= 0.501 * scale).all()
        assert after[f"{name}_packed"].dtype == np.int32

    config = json.loads((tmp_path / "out/config.json").read_text())
    about = config.pop("quantization_config")
    assert config["architectures"] == [recorded.CASES[case][0]]
    assert about["quant_method"], about["format"] == ("compressed-tensors", "pack-quantized")
    (group,) = about["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"]["num_bits"], group["weights"]["strategy"] == (8, "channel")
    assert about["ignore"] == ["lm_head"]


@pytest.mark.parametrize("scan", [False])
def test_states_and_checkpoints_give_the_same_files(scan: bool, tmp_path: Path) -> None:
    loaded = opened("qwen3", tmp_path, scan=scan)
    loaded.save(tmp_path / "host", loaded.parameters, quantize="int8", max_shard_size=20_000)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    sharded = from_folder(tmp_path / "in", zero=zero, scan=scan).parameters
    loaded.save(tmp_path / "sharded", sharded, quantize="int8", max_shard_size=20_000)
    about = {name: x for name, x in vars(loaded.model.config).items() if name != "dtype"}
    checkpoints.save(tmp_path / "steps", 1, {"params": sharded}, extra={"model": about})
    names, options = loaded.format.export_names, dict(max_shard_size=20_000, quantize="int8")
    export(tmp_path / "steps", tmp_path / "exported", names=names, **options)
    files = {file.name: file.read_bytes() for file in (tmp_path / "host").iterdir()}
    assert len(files) > 3
    for other in ("sharded", "exported"):
        assert {x.name: x.read_bytes() for x in (tmp_path / other).iterdir()} == files


@pytest.mark.slow
@pytest.mark.skipif(
    not LOADS,
    reason="torch, transformers and compressed-tensors are not installed: nothing to load with",
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_with_the_codes(case: str, tmp_path: Path) -> None:
    loaded = opened(case, tmp_path, scan=True)
    loaded.save(tmp_path / "out", loaded.parameters, quantize="int8")
    quantized = zerojax.quantize_weights(
        loaded.parameters, select=lambda path, x: "layers" in path and x.ndim > 2
    )
    apply = jax.jit(nn.apply(loaded.loss, loaded.model))
    variables = {"params": zerojax.dequantize(quantized)}
    ours = {call: apply(variables, batch)["logits"] for call, batch in inputs(case).items()}
    theirs = recorded.logits(case, tmp_path / "out")
    for call, logits in ours.items():
        np.testing.assert_allclose(logits, theirs[call], atol=2e-5, rtol=0)
        assert np.abs(logits - recorded.stored(case, call)).max() > 1e-4  # not the original ones


def test_what_has_no_place_in_the_format_is_refused(tmp_path: Path) -> None:
    config = GPTConfig(**SIZES["tiny"])
    params = jax.eval_shape(
        gpt2.FORMAT.model(config).init, jax.random.key(0), np.ones((1, 8), np.int32)
    )["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    with pytest.raises(ValueError, match=r"no tensor is the \[out, in\] matrix of a torch.nn.Lin"):
        gpt2.save(params, config, tmp_path / "out", quantize="int8")
    mixtral = opened("mixtral", tmp_path)
    with pytest.raises(ValueError, match=r"experts.0.w. ?.*is an expert's, and only dense layers"):
        mixtral.save(tmp_path / "out", mixtral.parameters, quantize="int8")
    llama = opened("llama3", tmp_path)
    with pytest.raises(ValueError, match=r"quantize='int4': write 'int8', or None for floats"):
        llama.save(tmp_path / "out", llama.parameters, quantize="int4")
    with pytest.raises(ValueError, match=r"and there is none: give config, or names of a model of"):
        save(tmp_path / "out", llama.parameters, llama.names, quantize="int8")
    names = {"w": zerojax.weights.Tensor("h.0.w.weight", "o i -> i o")}
    with pytest.raises(ValueError, match=r"h.0.w.weight \[8, 6\] has 6 inputs, and the format st"):
        save(tmp_path / "out", {"w": np.ones((6, 8))}, names, config={}, quantize="int8")
    checkpoints.save(tmp_path / "steps", 1, {"params": {"w": jax.numpy.ones((4, 3))}})
    with pytest.raises(CheckpointError, match=r"quantize='int8': no tensor is the \[out, in\] ma"):
        export(tmp_path / "steps", tmp_path / "out", quantize="int8")
    assert not (tmp_path / "out").exists()


def test_a_quantized_folder_is_not_read_back(tmp_path: Path) -> None:
    loaded = opened("llama3", tmp_path)
    loaded.save(tmp_path / "out", loaded.parameters, quantize="int8")
    with pytest.raises(ValueError, match=r"the weights are codes, and zerojax loads floats: gi"):
        from_folder(tmp_path / "out")
