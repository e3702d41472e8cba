"""The buffers that a compiled program holds at its peak, from XLA's buffer assignment.

    executable, held = compile_with_buffers(lowered)
    held[0].bytes, held[0].instruction

XLA exposes the assignment only as a dump, an ``HloProto``. This module declares the required fields
of that message, after ``xla/service/hlo.proto``; protobuf ignores the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

# Message -> field -> (number, type), with "*" after the type of a repeated field.
_SCHEMA = {
    "Buffer": {"id": (1, "int64"), "size": (2, "int64"), "color": (4, "int64")},
    "Event": {
        "kind": (1, "int32"),
        "buffer": (2, "int64"),
        "computation": (3, "string"),
        "instruction": (4, "string"),
        "shared_with": (5, "int64"),
    },
    "Trace": {"events": (1, "Event*")},
    "Assignment": {"buffers": (1, "Buffer*"), "traces": (4, "Trace*")},
    "Hlo": {"assignment": (3, "Assignment")},
}
# Without a GPU to test on, XLA may choose Triton tiles that it then cannot compile.
_LIBRARY_PRODUCTS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
_HOST = 5  # the memory space that HLO writes as S(5)
_FREED = 1  # Event.kind; 0 means allocated, 2 means shared


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """One temporary buffer held at the peak.

    Attributes:
      bytes: The size of the buffer.
      instruction: The name of the instruction that produced the newest value in the buffer.
      computation: The name of that instruction's computation.
    """

    bytes: int
    instruction: str
    computation: str


def compile_with_buffers(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] = MappingProxyType({})
) -> tuple[jax.stages.Compiled, tuple[HeldBuffer, ...]]:
    """Compiles a program and reads the temporary buffers it holds at its peak.

    Args:
      lowered: The program.
      options: Options of XLA that override those of the program.

    Returns:
      The executable, and its buffers, largest first; no buffers if the compiler writes no such dump
      (TPUs). The sum of the buffers may be below the executable's temporary bytes, which include
      gaps.
    """
    with tempfile.TemporaryDirectory(prefix="zerojax-") as folder:
        dump = {**options, "xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        try:
            executable = lowered.compile(compiler_options=dump)
        except jax.errors.JaxRuntimeError as error:
            if "tile" not in str(error):
                raise
            executable = lowered.compile(compiler_options=dump | _LIBRARY_PRODUCTS)
        dumps = sorted(Path(folder).glob("*after_optimizations.hlo.pb"))
        return executable, tuple(buffers_at_peak(dumps[-1].read_bytes()) if dumps else ())


def buffers_at_peak(dump: bytes) -> list[HeldBuffer]:
    """Returns the temporary buffers of a dumped program at its peak, largest first.

    Raises:
      ValueError: The bytes are not an ``HloProto``.
    """
    message = _message()
    try:
        assignment = message.FromString(dump).assignment
    except Exception as error:  # the class depends on protobuf's implementation
        raise ValueError(f"not a compiled program's dump: {error}") from error
    sizes = {buffer.id: buffer.size for buffer in assignment.buffers if buffer.color != _HOST}
    held: list[HeldBuffer] = []
    for trace in assignment.traces:
        held += _peak([event for event in trace.events if event.buffer in sizes], sizes)
    return sorted(held, key=lambda buffer: -buffer.bytes)


def _peak(events: Sequence[Any], sizes: dict[int, int]) -> list[HeldBuffer]:
    """Returns the buffers held at the peak of one heap."""
    totals = [total for total, _ in _heap(events, sizes)]
    if not totals:
        return []
    peak_index = totals.index(max(totals))
    _, values = next(itertools.islice(_heap(events, sizes), peak_index, None))
    newest = ((sizes[buffer], list(producer.values())[-1]) for buffer, producer in values.items())
    return [
        HeldBuffer(size, producer.instruction, producer.computation) for size, producer in newest
    ]


def _heap(
    events: Sequence[Any], sizes: dict[int, int]
) -> Iterator[tuple[int, dict[int, dict[int, Any]]]]:
    """Yields, after each event, the bytes held and, by buffer, the events that created its values.

    A value may share the buffer of an earlier value.
    """
    owner: dict[int, int] = {}  # value -> the value whose buffer holds it
    values: dict[int, dict[int, Any]] = {}  # buffer -> value -> event
    total = 0
    for event in events:
        if event.kind == _FREED:
            buffer = owner[event.buffer]
            del values[buffer][event.buffer]
            if not values[buffer]:
                del values[buffer]
                total -= sizes[buffer]
        else:
            buffer = owner[event.buffer] = owner.get(event.shared_with, event.buffer)
            if buffer not in values:
                values[buffer] = {}
                total += sizes[buffer]
            values[buffer][event.buffer] = event
        yield total, values


@functools.cache
def _message() -> Any:
    """Returns a protobuf class of ``HloProto``, with the fields of ``_SCHEMA``."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    scalar_types = {
        "int32": kinds.TYPE_INT32,
        "int64": kinds.TYPE_INT64,
        "string": kinds.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(name="zerojax.proto", package="zerojax")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            base = kind.removesuffix("*")
            label = kinds.LABEL_REPEATED if kind != base else kinds.LABEL_OPTIONAL
            field_proto = message.field.add(name=field, number=number, label=label)
            if base in scalar_types:
                field_proto.type = scalar_types[base]
            else:
                field_proto.type, field_proto.type_name = kinds.TYPE_MESSAGE, f".zerojax.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("zerojax.Hlo"))
