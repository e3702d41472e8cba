"""Loading sharded safetensors at stage 3: bytes read, host memory and time.

    python -m benchmarks.weights                                  # 1.1B, a minute on two cores
    python -m benchmarks.weights --model llama-7b                 # 13.5 GB on disk and in memory
    python -m benchmarks.weights --model llama-7b --record benchmarks/records

Random bf16 weights in files of 5 GB, under Hugging Face's names, are loaded onto 8 virtual devices
in a process of its own. To expect: each byte of the tensors is read once, and beside the shards,
which are in host memory too where the devices are virtual, the host holds at most 1.2 times the
largest tensor; else the exit status is 1.
"""

import argparse
import dataclasses
import re
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from benchmarks.checkpoint_memory import forget_peak, resident
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.separate import in_a_process
from examples.run_clm.devices import data_mesh
from zerojax.models.hugging_face.folder import abstract, by_path
from zerojax.models.hugging_face.llama import names
from zerojax.models.llama import SIZES, Llama, LlamaConfig
from zerojax.weights.names import link
from zerojax.weights.reader import open_tensors
from zerojax.weights.writer import TensorSpec, writing

MODELS = SIZES | {
    "llama-1b": SIZES["llama-7b"] | dict(n_layer=16, n_head=16, n_embd=2048, n_inner=5504)
}
COUNTING = 200  # bytes that the count of bytes reads itself
MOST = 1.2  # of the largest tensor, in host memory beside the shards
FILE_BYTES = 5 * 10**9
BLOCK = 2**24  # elements drawn at a time
BF16 = jnp.dtype(jnp.bfloat16)
GIGA, MEGA = 1e9, 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The bytes and the seconds of one load.

    Attributes:
      scan: Whether the layers are stacked.
      tensors, largest: Bytes of all tensors, and of the largest.
      files: Bytes of all files, headers included.
      read: Bytes that the process read by system calls while it loaded.
      before: Resident bytes with the devices ready and nothing on them.
      peak: The most resident bytes until all was loaded.
      shards: Bytes that the devices hold then.
      seconds: Seconds that the load took.
    """

    scan: bool
    tensors: int
    largest: int
    files: int
    read: int
    before: int
    peak: int
    shards: int
    seconds: float

    @property
    def beside(self) -> float:
        """Host memory beside the shards at the peak, as a multiple of the largest tensor."""
        return (self.peak - self.before - self.shards) / self.largest

    def missed(self) -> list[str]:
        """One line for each limit that was missed."""
        limits = {
            f"{self.read:,} bytes read of {self.files:,}": self.read <= self.files + COUNTING,
            f"{self.beside:.2f} of the largest tensor, more than {MOST}": self.beside <= MOST,
        }
        return [text for text, kept in limits.items() if not kept]


def write(folder: Path, model: str) -> None:
    """Random weights in several files."""
    rng = np.random.default_rng(0)
    model_of = Llama(LlamaConfig(**MODELS[model], scan=True))
    shapes = link(
        names(model_of.config), {path: x.shape for path, x in by_path(abstract(model_of)).items()}
    ).tensors
    tensors = [TensorSpec(name, shape, BF16) for name, shape in shapes.items()]
    with writing(folder, tensors, max_bytes=FILE_BYTES) as put:
        for tensor in tensors:
            for begin in range(0, tensor.nbytes // 2, BLOCK):
                size = min(BLOCK, tensor.nbytes // 2 - begin)
                bits = rng.integers(0, 0x3F80, size, np.uint16)  # of numbers below 1
                put(tensor.name, bits.view(BF16), begin)


def measure(path: str, model: str, scan: bool) -> Loaded:
    """Loads the files of a folder, and measures this process."""
    folder = Path(path)
    llama = Llama(LlamaConfig(**MODELS[model], scan=scan))
    zero = zerojax.zero(stage=3, mesh=data_mesh(None))
    tokens = jnp.zeros((1, 8), jnp.int32)

    def create_state(key: jax.Array) -> TrainState:
        params = llama.init(key, tokens)["params"]
        params = jax.tree.map(lambda x: x.astype(BF16), params)
        return TrainState.create(apply_fn=llama.apply, params=params, tx=optax.sgd(0.1))

    like = zero.abstract_state(create_state, jax.random.key(0)).params
    with open_tensors(folder) as found:
        sizes = [2 * int(np.prod(tensor.shape)) for tensor in found.values()]
    before = resident("VmRSS")
    forget_peak()
    bytes_before, begun = _bytes_read(), time.perf_counter()
    params = zerojax.weights.load(folder, like=like, names=names(llama.config))
    jax.block_until_ready(params)
    seconds, bytes_after = time.perf_counter() - begun, _bytes_read()
    peak = resident("VmHWM")
    return Loaded(
        scan=scan,
        tensors=sum(sizes),
        largest=max(sizes),
        files=sum(file.stat().st_size for file in folder.iterdir()),
        read=bytes_after - bytes_before,
        before=before,
        peak=peak,
        shards=sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards),
        seconds=seconds,
    )


def _bytes_read() -> int:
    """Returns the bytes that this process read by system calls, from the page cache or the disk."""
    match = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def table(results: list[Loaded]) -> list[list[str]]:
    """Headings, and a row for each load."""
    return [
        [
            "layers",
            "bytes of the tensors",
            "bytes read",
            "largest tensor, MB",
            "shards, MB",
            "peak beside the shards, MB",
            "of the largest tensor",
            "at most",
            "seconds",
        ],
        *(
            [
                "stacked" if each.scan else "by layer",
                f"{each.tensors:,}",
                f"{each.read:,}",
                f"{each.largest / MEGA:,.0f}",
                f"{each.shards / MEGA:,.0f}",
                f"{each.beside * each.largest / MEGA:,.0f}",
                f"{each.beside:.2f}",
                str(MOST),
                f"{each.seconds:.1f}",
            ]
            for each in results
        ),
    ]


@question(
    "weights",
    "Loading sharded safetensors at stage 3",
    argument("--model", choices=[*MODELS], default="llama-1b"),
    argument("--folder", type=Path, help="holds the files, and keeps them"),
)
def main(options: argparse.Namespace) -> Answer:
    model = options.model
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not [*folder.glob("*.safetensors")]:
            say(f"writing {model}")
            write(folder, model)
        files = len([*folder.glob("*.safetensors")])
        results = [
            Loaded(**in_a_process(measure, str(folder.absolute()), model, scan))
            for scan in (False, True)
        ]
    note = (
        f"{model} in bf16, {files} files of at most {FILE_BYTES / GIGA:.0f} GB with random "
        "numbers, onto 8 devices at stage 3.\nBytes read are those of the process's system calls, "
        "headers and index among them; the shards of virtual devices are in host memory, "
        "where devices that hold the same elements may share them."
    )
    return Answer(
        {"model": model, "loads": results},
        [note, Table(table(results))],
        missed=[text for each in results for text in each.missed()],
        machine=", 8 virtual devices",
    )


if __name__ == "__main__":
    main()
