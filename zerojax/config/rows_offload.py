"""Keys of what lies in host memory or on disk."""

from collections.abc import Iterator

from zerojax.config.errors import shown
from zerojax.config.kinds import BUFFERS, FLAG, FRACTION, SIZE, TEXT, choice, optional
from zerojax.config.row import FLAG_OFF, Key, honoured, taken

_ZERO = "zero_optimization"
_PIPELINED = "reads ahead and writes behind always run beside the update"


def offload() -> Iterator[Key]:
    yield from _section(
        "offload_optimizer",
        "master weights and moments lie in host memory (cpu) or on disk (nvme)",
        buffers=4,
    )
    yield from _section(
        "offload_param",
        "parameters lie in host memory (cpu) or on disk (nvme, experimental), and come in before "
        "their use",
        buffers=5,
    )
    yield from _optimizer(f"{_ZERO}.offload_optimizer")
    yield from _param(f"{_ZERO}.offload_param")
    yield from honoured(
        f"{_ZERO}.sub_group_size",
        SIZE,
        1_000_000_000,
        field="sub_group_size",
        auto="DeepSpeed's default, 1000000000 elements, as an upper bound",
        why="an upper bound, in elements, on what is updated at a time under offload: zerojax "
        "streams in pieces of at most 33,554,432; 0 sets no bound of its own",
    )
    yield from taken(
        _ZERO,
        "no effect",
        "momentum moves with the rest of the state",
        save_muon_momentum_buffer_in_memory=FLAG_OFF,
    )
    yield from _old()


def _section(section: str, why: str, buffers: int) -> Iterator[Key]:
    path = f"{_ZERO}.{section}"
    device = optional(choice("none", "cpu", "nvme"))
    yield from honoured(f"{path}.device", device, "none", auto="none: not asked for", why=why)
    yield from honoured(
        f"{path}.nvme_path",
        optional(TEXT),
        None,
        auto='none: only device "nvme" has one',
        why="the folder that the files are written to",
    )
    yield from honoured(
        f"{path}.buffer_count",
        BUFFERS,
        buffers,
        auto=f"DeepSpeed's default, {buffers}",
        why="so many pieces lie in host memory at a time, read ahead and written behind",
    )
    yield from taken(path, "no effect", "host memory is always pinned", pin_memory=FLAG_OFF)


def _optimizer(path: str) -> Iterator[Key]:
    yield from honoured(
        f"{path}.ratio",
        FRACTION,
        1.0,
        auto="DeepSpeed's default, all of it",
        why="the share that is offloaded; the rest stays on the accelerator",
    )
    yield from honoured(
        f"{path}.compute_on",
        optional(choice("device", "host")),
        None,
        auto="device: what gives the same bits as without offload",
        why="zerojax's own: the update streams through the accelerator (device) or is computed by "
        "the host's cores (host); null is device, which gives the same bits as without offload",
    )
    yield from taken(path, "no effect", _PIPELINED, pipeline_read=FLAG_OFF, pipeline_write=FLAG_OFF)
    yield from taken(
        path, "no effect", "zero.init makes the state where it lies", fast_init=FLAG_OFF
    )
    yield from taken(
        path,
        "no effect",
        "compute_on says where the update runs",
        super_offload=FLAG_OFF,
        cpuadam_cores_perc=(FRACTION, 0.8),
    )
    yield from taken(
        path,
        "no effect",
        "gradients are cast where the update runs",
        convert_grad_on_cpu=(FLAG, True),
    )


def _param(path: str) -> Iterator[Key]:
    yield from honoured(
        f"{path}.max_in_cpu",
        SIZE,
        1_000_000_000,
        auto="DeepSpeed's default, 1000000000 elements",
        why="so many elements of the parameters stay in host memory",
    )
    yield from taken(
        path,
        "no effect",
        "sizes come from sub_group_size",
        buffer_size=(SIZE, 100_000_000),
    )


def _old() -> Iterator[Key]:
    for name, section in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ):
        means = shown({section: {"device": "cpu"}})
        yield from honoured(
            f"{_ZERO}.{name}",
            optional(FLAG),
            None,
            auto="off: not asked for",
            why=f"deprecated by DeepSpeed; true is read as {means}",
        )
    yield from taken(
        _ZERO,
        "no effect",
        "host memory is always pinned",
        cpu_offload_use_pin_memory=(optional(FLAG), None),
    )
