"""A compiled XLA program, parsed from its text.

    program = parse(compiled.as_text())
    program.entry.instructions          # in scheduled order

The result has names, shapes, operands and the raw attributes, for the other files of this folder.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?[:=]\{"?n"?:"?(\d+)')
_ASYNC = re.compile(r"-(start|update|done)$")
_BITS = re.compile(r"\d+")
_HOST = ":S(5)"  # the memory space in an array's layout


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a value: ``bf16[1600,4800]``."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size without the layout's padding; 0 for a token or an opaque value."""
        digits = _BITS.search(self.dtype)
        bits = 8 if self.dtype == "pred" else int(digits[0]) if digits else 0
        return math.ceil(self.elements * bits / 8)

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name, opcode: Its name in the program, and what it does.
      shapes: The arrays of its result; those of a tuple are flattened in order.
      operands: The names of its operands.
      attributes: The text after the operands.
      argument: The text of a parameter's or a constant's operand.
      is_root: Whether the computation returns its result.
      in_host: Whether its result, or the first array of a tuple, is in host memory.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    argument: str
    is_root: bool = False
    in_host: bool = False

    @property
    def bytes(self) -> int:
        """The size of all ``shapes``."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def operation(self) -> str:
        """The opcode without ``-start``, ``-update`` or ``-done``."""
        return _ASYNC.sub("", self.opcode)

    @property
    def op_name(self) -> str:
        """The origin in the traced Python: ``jit(step)/transpose(jvp(GPT))/mul``."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs, except a ``while``'s condition."""
        if self.operation in ("fusion", "call", "while", "conditional", "async"):
            names = [
                name
                for key, name in _CALLED.findall(self.attributes)
                if key != "to_apply" or self.opcode == "call"
            ]
            for branches in _BRANCHES.findall(self.attributes):
                names += _OPERAND.findall(branches)
            return tuple(names)
        return ()

    @property
    def trip_count(self) -> int | None:
        """The trip count that XLA notes for a ``while``; None if XLA does not know."""
        match = _TRIPS.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def index(self) -> int:
        """The element that a ``get-tuple-element`` takes, or the number of a ``parameter``."""
        if self.opcode == "parameter":
            return int(self.argument)
        match = re.search(r"\bindex=(\d+)", self.attributes)
        assert match, self
        return int(match[1])


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        return {each.name: at for at, each in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        users: dict[str, list[Instruction]] = {each.name: [] for each in self.instructions}
        for each in self.instructions:
            for operand in dict.fromkeys(each.operands):
                if operand in users:
                    users[operand].append(each)
        return {name: tuple(instructions) for name, instructions in users.items()}

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[self.position[name]]

    def parameter(self, number: int) -> Instruction | None:
        for each in self.instructions:
            if each.opcode == "parameter" and each.index == number:
                return each
        return None

    @property
    def root(self) -> Instruction:
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])


class Run(NamedTuple):
    """An instruction that a program runs.

    Attributes:
      computation: The computation that contains the instruction.
      instruction: The instruction.
      times: The product of the enclosing loops' trip counts; an unknown one counts once.
    """

    computation: Computation
    instruction: Instruction
    times: int


class Caller(NamedTuple):
    """The loop that runs a body, and the computation around that loop."""

    computation: Computation
    loop: Instruction


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """All computations by name, and the number of devices the program runs on."""

    computations: Mapping[str, Computation]
    entry_name: str
    devices: int

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    @functools.cached_property
    def callers(self) -> Mapping[str, Caller]:
        """The caller of each loop's body, by the name of the body."""
        return {
            body.name: Caller(run.computation, run.instruction)
            for run in self.walk()
            if run.instruction.opcode == "while"
            for body in self.callees(run.instruction)
        }

    def walk(self, *, fused: bool = False) -> Iterator[Run]:
        """Yields the instructions that run, in scheduled order.

        Those of loops, calls and conditionals (every branch) follow the instruction that runs them;
        a computation called from two places comes twice.

        Args:
          fused: Whether to include the instructions of fusions and asynchronous computations.
        """
        inside = self.callees if fused else self.nested

        def run(computation: Computation, times: int) -> Iterator[Run]:
            for each in computation.instructions:
                yield Run(computation, each, times)
                trips = self.trips(each) if each.opcode == "while" else 1
                for callee in inside(each):
                    yield from run(callee, times * (trips or 1))

        return run(self.entry, 1)

    def trips(self, loop: Instruction) -> int | None:
        """Returns the trip count of a ``while``, from XLA's note or its condition, else None.

        The condition of a scan counts from 0 up to a constant.
        """
        match = re.search(r"\bcondition=%([\w.\-]+)", loop.attributes)
        condition = self.computations.get(match[1]) if match else None
        if loop.trip_count is not None or condition is None:
            return loop.trip_count
        test = condition.root
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        left, right = (condition[name] for name in test.operands)
        is_counter = left.opcode == "get-tuple-element" and right.opcode == "constant"
        return int(right.argument) if is_counter and right.argument.isdigit() else None

    def nested(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that a loop, a call or a conditional runs in turn."""
        if instruction.opcode in ("while", "call", "conditional"):
            yield from self.callees(instruction)

    def callees(self, instruction: Instruction) -> Iterator[Computation]:
        """Yields the computations that run as part of an instruction, also those of a fusion."""
        for name in instruction.called:
            if name in self.computations:
                yield self.computations[name]


@functools.lru_cache(maxsize=4)
def parse(text: str) -> HloProgram:
    """Parses the program in ``compiled.as_text()``.

    Raises:
      ValueError: The text has no entry computation, so it is not a compiled program's.

    Example::

      parse(jax.jit(f).lower(x).compile().as_text()).entry.root
    """
    computations: dict[str, Computation] = {}
    lines: list[Instruction] = []
    name, entry = "", None
    # XLA for TPUs writes what a kernel says of itself on lines of its own.
    for line in re.sub(r'\n(?="|}})', "", text).splitlines():
        header = _HEADER.match(line)
        if header:
            lines, name = [], header[2]
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
        elif head := _INSTRUCTION.match(line):
            lines.append(_instruction(head, line[head.end() :]))
    if entry is None:
        raise ValueError("no ENTRY computation in the text: pass compiled.as_text()")
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    return HloProgram(computations, entry, math.prod(map(int, counts)))


def _instruction(head: re.Match[str], rest: str) -> Instruction:
    in_host = _HOST in rest.split(" ", 1)[0]
    result, rest = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    argument, attributes = _split("(" + rest)
    return Instruction(
        name=head[2],
        opcode=opcode,
        shapes=shapes(result),
        operands=tuple(_OPERAND.findall(argument)),
        attributes=attributes,
        argument=argument[1:-1] if opcode in ("parameter", "constant") else "",
        is_root=bool(head[1]),
        in_host=in_host,
    )


def shapes(text: str) -> tuple[Shape, ...]:
    """Returns the arrays named in HLO text, in order."""
    return tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(text)
    )


def _split(text: str) -> tuple[str, str]:
    """Splits a text after the parenthesis that closes its first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return text[: match.end()], text[match.end() :]
    return text, ""
