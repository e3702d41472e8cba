"""Floating-point operations and bytes of each instruction of a compiled program.

work = work_of(program, computation, instruction)
work.flops, work.bytes
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zerojax.devices.rates import FusedAttention, Rates
from zerojax.hlo.program import Computation, HloProgram, Instruction, Shape

# Opcodes without a kernel: names for values, synchronisation, and calls of other computations.
FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "add-dependency",
        "iota", "while", "conditional", "call",
    }
)  # fmt: skip
# The position of the update among the operands of an operation that writes into its first operand.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
_LIBRARY = re.compile("gemm|matmul|conv")
_ATTENTION = "__cudnn$fmha"
# The scope in which `pallas_kernels.attention` calls a Mosaic kernel: its pass, mask and window.
_MOSAIC = re.compile(r"fused_attention(_backward)?(_causal)?(?:_of_(\d+))?\b(?!.*fused_attention)")
# The kernels of jax.experimental.pallas.ops.tpu.splash_attention.
_SPLASH = re.compile(r"\bsplash_m[hq]a_(fwd|dq|dkv)")
# Matrix products of a backward kernel, by the number of its results: dq; dk and dv; all three.
_PRODUCTS = {1: 3, 2: 4, 3: 5}
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]')
_CAUSAL = re.compile(r'"mask_type":"(PADDING_)?CAUSAL"')
_TILE = 128
"""Queries that a kernel of attention computes together: it skips the keys that none of them sees.
"""
_GEMM = re.compile(r'"(lhs|rhs)_(contracting|batch)_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one instruction, in one run.

    Attributes:
      flops: Floating-point operations of matrix products by the dtype of their operands, 2 for
        each multiplication, without those inside kernels of attention.
      attention: Floating-point operations of products inside kernels of attention, without those
        that a kernel skips behind a causal mask.
      forward: The part of them in the forward pass, without repetitions in the backward pass.
      bytes: Bytes read from and written to device memory. Of a sliced array, only the slice counts.
    """

    flops: Mapping[str, int]
    attention: Mapping[FusedAttention, int]
    forward: int
    bytes: int

    def seconds(self, rates: Rates) -> float:
        """Returns the time of one run on a device, by the roofline model."""
        return rates.compute_seconds(self.flops, self.bytes, self.attention)


class Product(NamedTuple):
    """A matrix product, or the products inside a kernel of attention.

    Attributes:
      op_name: The origin in the traced Python.
      dtype: The dtype of the operands.
      flops: Floating-point operations; those behind a causal mask count.
      attention: The kind of the kernel of attention, if it is one.
      skipped: The share of the operations that the kernel skips.
    """

    op_name: str
    dtype: str
    flops: int
    attention: FusedAttention | None = None
    skipped: float = 0.0


def products(program: HloProgram, computation: Computation, each: Instruction) -> Iterator[Product]:
    """Yields the matrix products of one instruction, including those fused into it."""
    for parent, product in _products(program, computation, each):
        found = _product(parent, product)
        yield found._replace(op_name=product.op_name or each.op_name)


def work_of(program: HloProgram, computation: Computation, each: Instruction) -> Work:
    """Returns the work of one instruction, including all instructions fused into it."""
    flops, attention = collections.Counter[str](), collections.Counter[FusedAttention]()
    forward = 0
    for product in products(program, computation, each):
        if product.attention:
            attention[product.attention] += round(product.flops * (1 - product.skipped))
        else:
            flops[product.dtype] += product.flops
        forward += product.flops if is_forward(product.op_name) else 0
    return Work(flops, attention, forward, _bytes(program, computation, each))


def is_forward(op_name: str) -> bool:
    """Returns whether an operation is in the forward pass, not its repetition in the backward."""
    return "jvp(" in op_name and "transpose(" not in op_name and "rematted" not in op_name


def _products(
    program: HloProgram, computation: Computation, each: Instruction
) -> list[tuple[Computation, Instruction]]:
    is_library = _LIBRARY.search(_target(each)) or _is_attention(each)
    if each.opcode in ("dot", "convolution") or is_library:
        return [(computation, each)]
    if each.operation not in ("fusion", "async"):
        return []
    inner = program.callees(each)
    return [product for c in inner for i in c.instructions for product in _products(program, c, i)]


def _is_attention(each: Instruction) -> bool:
    target = _target(each)
    if target.startswith(_ATTENTION):
        return True
    scope = _MOSAIC if target.startswith("mosaic_gpu") else _SPLASH
    return bool(target and scope.search(each.op_name))


def _target(each: Instruction) -> str:
    if each.opcode != "custom-call":
        return ""
    match = re.search(r'custom_call_target="([^"]*)"', each.attributes)
    return match[1] if match else ""


def _product(computation: Computation, product: Instruction) -> Product:
    """Counts 2 * elements of the result * products summed in each."""
    if "conv" in _target(product):
        return _library_convolution(computation, product)
    if _target(product).startswith(_ATTENTION):
        return _library_attention(computation, product)
    if _target(product).startswith("tpu"):
        return _splash_attention(computation, product)
    if _is_attention(product):
        return _mosaic_attention(computation, product)
    left = computation[product.operands[0]].shapes[0]
    result = product.shapes[0]  # a library's workspace follows
    if product.opcode == "convolution":
        summed = _convolved(product, computation[product.operands[1]].shapes[0])
    else:
        summed = math.prod(left.dims[axis] for axis in _contracted(product))
    return Product("", left.dtype, 2 * result.elements * summed)


def _library_convolution(computation: Computation, call: Instruction) -> Product:
    """Counts cuDNN's convolutions: each pass multiplies as often as the forward pass."""
    first, second = (computation[name].shapes[0] for name in call.operands[:2])
    target, result = _target(call), call.shapes[0]
    output, kernel = result, second
    if "BackwardInput" in target:
        output = first
    elif "BackwardFilter" in target:
        output, kernel = second, result
    labels = re.search(r"dim_labels=\w+_(\w+)->", call.attributes)
    features = kernel.dims[labels[1].index("o")] if labels else 1
    return Product("", first.dtype, 2 * output.elements * kernel.elements // features)


def _library_attention(computation: Computation, call: Instruction) -> Product:
    """Counts cuDNN's attention: two products of the scores' size forward, five backward, one of
    which is a repetition."""
    query = computation[call.operands[0]].shapes[0]
    match = _SCORES.search(call.attributes)
    scores = [int(n.strip('" ')) for n in match[1].split(",")] if match else [0]
    is_backward, width = "Backward" in _target(call), query.dims[-1]
    flops = 2 * (5 if is_backward else 2) * math.prod(scores) * width
    skipped = _behind(scores[-1]) if _CAUSAL.search(call.attributes) else 0.0
    kind = FusedAttention(query.dtype, width, is_backward)
    return Product("", query.dtype, flops, kind, skipped)


def _behind(keys: int) -> float:
    """Returns the share of a kernel's scores that lie behind a causal mask in tiles of their own:
    a tile of queries computes the keys up to its last query."""
    return max(0.0, (keys - _TILE) / (2 * keys)) if keys else 0.0


def _mosaic_attention(computation: Computation, call: Instruction) -> Product:
    """Counts a Mosaic kernel for q [B, T, H, d] and k [B, S, G, d]: two products of the scores'
    size forward; backward three for dq, four for dk and dv, as each kernel computes the scores
    again. Scores before a sliding window do not count."""
    query, key = (computation[name].shapes[0] for name in call.operands[:2])
    scope = _MOSAIC.search(call.op_name)
    assert scope
    *rows, queries, heads, width = query.dims
    visible_keys = min(key.dims[-3], int(scope[3])) if scope[3] else key.dims[-3]
    result_count = sum(shape.dtype == query.dtype for shape in call.shapes)
    products = _PRODUCTS.get(result_count, 5) if scope[1] else 2
    flops = 2 * products * math.prod(rows) * heads * queries * visible_keys * width
    skipped = _behind(visible_keys) if scope[2] and not scope[3] else 0.0
    kind = FusedAttention(query.dtype, width, bool(scope[1]))
    return Product("", query.dtype, flops, kind, skipped)


def _splash_attention(computation: Computation, call: Instruction) -> Product:
    """Counts a splash kernel for q [B, H, T, d] and k [B, G, S, d], as a Mosaic kernel. One that
    computes its mask from the positions of queries, its last operand, has a causal one."""
    operands = [computation[name].shapes[0] for name in call.operands]
    query, key = [each for each in operands if each.dtype in ("bf16", "f16", "f32")][:2]
    scope, (keys, width) = _SPLASH.search(call.op_name), key.dims[-2:]
    is_backward = scope is not None and scope[1] != "fwd"
    result_count = sum(shape.dtype == query.dtype for shape in call.shapes)
    products = _PRODUCTS.get(result_count, 5) if is_backward else 2
    kind = FusedAttention(query.dtype, width, is_backward)
    skipped = _behind(keys) if operands[-1].dtype == "s32" else 0.0
    return Product("", query.dtype, 2 * products * query.elements * keys, kind, skipped)


def _convolved(product: Instruction, kernel: Shape) -> int:
    """Returns how many products a convolution sums into one element of its result.

    The number is the kernel's input features times the positions of its window. XLA for TPUs writes
    matrix products as convolutions: a window dilated to its own size is a batch of products, each
    of which uses one position.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", product.attributes)
    window = re.search(r"window=\{size=([\dx]+)", product.attributes)
    features = kernel.dims[labels[1].index("i")] if labels else 1
    positions = math.prod(int(n) for n in window[1].split("x")) if window else 1
    return features * (1 if "lhs_dilate" in product.attributes else positions)


def _contracted(product: Instruction) -> list[int]:
    match = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", product.attributes)
    axes = match[1] if match else ""
    for side, kind, numbers in _GEMM.findall(product.attributes):
        if (side, kind) == ("lhs", "contracting"):
            axes = numbers.replace('"', "")
    return [int(number) for number in axes.split(",") if number]


def _bytes(program: HloProgram, computation: Computation, each: Instruction) -> int:
    if each.opcode in FREE:
        return 0
    read = [computation[name] for name in each.operands if name in computation.position]
    results = each.shapes[:1] if _LIBRARY.search(_target(each)) else each.shapes
    written = sum(shape.bytes for shape in results)
    if each.operation in ("slice", "dynamic-slice", "gather"):
        return 2 * written
    if each.operation in _IN_PLACE:
        return 2 * read[_IN_PLACE[each.operation]].bytes
    inside = next(program.callees(each), None) if each.operation in ("fusion", "async") else None
    if inside is None:
        return written + sum(operand.bytes for operand in read)
    total = min(_written(inside), written)
    for number, operand in enumerate(read):
        if parameter := inside.parameter(number):
            total += _read(inside, parameter.name, operand.bytes)
    return total


def _read(inside: Computation, name: str, size: int) -> int:
    """Returns the bytes that a fusion reads of a value inside it, also through bitcasts: only the
    slices if it only slices the value."""
    total = 0
    for user in inside.users.get(name, ()):
        if user.opcode == "bitcast":
            total += _read(inside, user.name, size)
        elif user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.opcode not in _IN_PLACE or user.operands[0] != name:
            return size  # a value that is updated in place is not read
    return min(total, size)


def _written(inside: Computation) -> int:
    root = inside.root
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for each in results:
        while each.opcode in ("bitcast", "copy") and each.operands:
            each = inside[each.operands[0]]
        if each.opcode in _IN_PLACE:
            each = inside[each.operands[_IN_PLACE[each.opcode]]]
        total += each.bytes
    return total
