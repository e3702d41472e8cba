"""Jaxprs evaluated without a compile, so that equal programs have equal results to the last bit.

Floating-point numbers stand for integers modulo a prime. There sums, products and quotients are
exact, so that a sum in another order, by row, by device or by micro-batch, is the same number.
Every other function (an exponential, a rounding, a random draw) is a hash of its operands. Two
programs then compute equal results if they are the same up to the order of sums, repeated work,
moved elements, constraints and barriers. A dropped term, a wrong operand, or one rounding more
changes the results, but for one chance in 2**31.

Integers and booleans are evaluated as usual, so that loops run and rows are looked up. A hash
decides which of two floating-point numbers is the greater.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import exact_lookups
import jax
import jax.numpy as jnp
import numpy as np

from zerojax.xla import hijax, jaxprs

PRIME = 2**31 - 1
MOST = 1000  # iterations of a while loop

Array = np.ndarray
_LABELS = ("sharding_constraint", "name", "copy", "copy_p", "optimization_barrier", "device_put",
           "reshard", "stop_gradient")  # fmt: skip
_HASHED = frozenset({
    "acos", "asin", "atan", "atan2", "cbrt", "ceil", "clamp", "cos", "cosh", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p", "logistic",
    "pow", "reduce_precision", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "tan",
    "tanh",
})  # fmt: skip
_INTEGER: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "abs": np.abs, "sign": np.sign, "rem": np.fmod,
    "shift_left": np.left_shift, "shift_right_logical": np.right_shift, "square": np.square,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "clamp": lambda low, x, high: np.clip(x, low, high),
    "div": lambda a, b: np.where(b == 0, 0, np.fix(a / np.where(b == 0, 1, b))),
    "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_and": np.all,
    "reduce_or": np.any,
}  # fmt: skip


def run(
    closed: Any, args: Sequence[Array], equation: Callable[..., Any] | None = None
) -> list[Array]:
    """The results of a jaxpr on arrays of :func:`lift` or :func:`arbitrary`."""
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    env: dict[Any, Array] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*map(lift, consts), *args), strict=True)
    )

    def read(v: Any) -> Array:
        return lift(np.asarray(v.val, v.aval.dtype)) if hasattr(v, "val") else env[v]

    for eqn in jaxpr.eqns:
        outs = (equation or _equation)(eqn, [read(v) for v in eqn.invars])
        for v, x in zip(eqn.outvars, outs, strict=True):
            assert np.shape(x) == v.aval.shape, (eqn.primitive, np.shape(x), v.aval)
            env[v] = _typed(x, v.aval.dtype)
    return [read(v) for v in jaxpr.outvars]


def differing(one: Callable[..., Any], other: Callable[..., Any], *args: Any) -> list[int]:
    """The positions of the results, flattened, in which two functions of the same arguments
    differ. Each is traced."""
    leaves = jax.tree.leaves(args)
    given = [
        arbitrary(x.shape, x.dtype, i) if jnp.issubdtype(x.dtype, jnp.floating) else lift(x)
        for i, x in enumerate(leaves)
    ]
    outs = (run(hijax.trace(f, *args)[0], given) for f in (one, other))
    return [i for i, (a, b) in enumerate(zip(*outs, strict=True)) if not np.array_equal(a, b)]


def lift(x: Any) -> Array:
    """Converts an array to the form of :func:`run`; floating-point numbers are exact fractions."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) if hasattr(x, "dtype") else False:
        return lift(np.asarray(jax.random.key_data(x)))[..., 0].astype(np.uint64)
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    mantissa, exponent = np.frexp(np.where(finite, wide, 0.0))
    whole = np.mod((mantissa * 2**53).astype(np.int64), PRIME).astype(np.uint64)
    powers = {e: pow(2, int(e) - 53, PRIME) for e in np.unique(exponent)}
    scale = np.vectorize(powers.__getitem__, otypes=[np.uint64])(exponent)
    return np.where(finite, whole * scale % PRIME, _hash("not finite", _bits(wide)))


def arbitrary(shape: Sequence[int], dtype: Any, seed: int) -> Array:
    """Arbitrary numbers of a floating dtype, or keys."""
    return _typed(_mix(np.arange(math.prod(shape)) + (seed << 32)).reshape(shape) % PRIME, dtype)


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint64).reshape(x.shape)


def _typed(x: Any, dtype: Any) -> Array:
    """Converts results to a dtype: rounded where the dtype has 16 bits or fewer."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return np.asarray(x, np.uint64)
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(x).astype(dtype, copy=False)
    return _rounded(x, dtype) if dtype.itemsize < 4 else np.asarray(x, np.uint64)


def _rounded(x: Array, dtype: Any) -> Array:
    """A hash whose last eight bits mark it as rounded. Small integers are unchanged."""
    tag = _seed(str(dtype)) % 256
    same = (x % 256 == tag) | (x < 256) | (PRIME - x < 256)
    return np.where(same, x, _mix(x + _seed(str(dtype))) % (PRIME // 256) * 256 + tag)


def _mix(x: Any) -> Array:
    """splitmix64."""
    with np.errstate(over="ignore"):
        z = np.asarray(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _seed(*things: Any) -> int:
    digest = hashlib.blake2b(digest_size=6)
    for x in things:
        digest.update(str((x.dtype, x.shape)).encode() if isinstance(x, Array) else b"")
        digest.update(x.tobytes() if isinstance(x, Array) else str(x).encode())
    return int.from_bytes(digest.digest(), "little")


def _hash(name: Any, *operands: Array) -> Array:
    """A number for each element, of those of all operands."""
    value = np.asarray(_seed(name), np.uint64)
    for x in operands:
        value = _mix(value ^ _mix(x))
    return value % PRIME


def _named(eqn: Any) -> tuple[str, ...]:
    """The equation's primitive and parameters, without those of placement."""
    left = ("sharding", "mesh", "name", "preferred_element_type", "update_")
    params = {k: v for k, v in eqn.params.items() if not any(word in k for word in left)}
    return eqn.primitive.name, *map(str, sorted(params.items()))


def _equation(eqn: Any, values: list[Array]) -> Sequence[Array]:
    name = eqn.primitive.name
    if name in _LABELS:
        return values
    if eqn.primitive in jaxprs.CALLS:
        return run(jaxprs.called_jaxpr(eqn), values)
    if name in _CONTROL:
        return _CONTROL[name](eqn, values)
    if name == "reduce" and [e.primitive.name for e in eqn.params["jaxpr"].eqns] == ["add"]:
        x, start = values
        return [(start + x.sum(eqn.params["dimensions"], dtype=np.uint64)) % PRIME]
    if not name.startswith("scatter") and any(True for _ in jaxprs.inner(eqn)):
        raise NotImplementedError(name)
    if name in _MOVES:
        out = _MOVES[name](eqn.params, *values)
        return out if isinstance(out, list) else [out]
    if name in ("gather", "scatter", "scatter-add"):
        return [_looked_up(eqn, values)]
    floats = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars]
    if name == "convert_element_type":
        return [_converted(values[0], eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)]
    if any(floats):
        if name in _FIELD:
            return [_FIELD[name](eqn.params, *values)]
        if name in _HASHED and not eqn.primitive.multiple_results:
            return [_number(_hash(_named(eqn), *values), eqn.outvars[0].aval.dtype)]
    elif name in _INTEGER:
        axes = {"axis": tuple(eqn.params["axes"])} if "axes" in eqn.params else {}
        with np.errstate(over="ignore"):
            return [_INTEGER[name](*values, **axes)]
    whole = _seed(_named(eqn), *values)
    return [
        _number(_hash((whole, i), np.arange(math.prod(v.aval.shape))), v.aval.dtype).reshape(
            v.aval.shape
        )
        for i, v in enumerate(eqn.outvars)
    ]


def _looked_up(eqn: Any, values: list[Array]) -> Array:
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    if name == "gather":
        picked, outside = exact_lookups.gather(eqn.params, *values)
        return np.where(outside, _number(_hash("filled"), dtype), picked)
    out = exact_lookups.scatter(eqn.params, *values, add=name == "scatter-add")
    return out % PRIME if jnp.issubdtype(dtype, jnp.floating) else out


def _number(hashed: Array, dtype: Any) -> Array:
    """A hash as an element of a dtype; a small number where the dtype is of signed integers."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return hashed % 2 == 1
    return hashed % 8 if jnp.issubdtype(dtype, jnp.signedinteger) else hashed


def _converted(x: Array, source: Any, dtype: Any) -> Array:
    from_float, to_float = (jnp.issubdtype(d, jnp.floating) for d in (source, dtype))
    if from_float and to_float:
        return _rounded(x, dtype) if dtype.itemsize < source.itemsize else x
    if from_float:
        return (
            x != 0 if jnp.issubdtype(dtype, jnp.bool_) else _number(_hash(f"to {dtype}", x), dtype)
        )
    return np.mod(x.astype(np.int64), PRIME).astype(np.uint64) if to_float else x


def _inverse(x: Array) -> Array:
    """``x ** (PRIME - 2)``: of 0 it is 0."""
    result, power = np.ones_like(x), x
    for bit in bin(PRIME - 2)[:1:-1]:
        result = result * power % PRIME if bit == "1" else result
        power = power * power % PRIME
    return result


def _power(p: Any, x: Array) -> Array:
    result = np.ones_like(x)
    for _ in range(abs(p["y"])):
        result = result * x % PRIME
    return result if p["y"] >= 0 else _inverse(result)


def _product(p: Any, a: Array, b: Array) -> Array:
    """A ``dot_general``. Factors of 16 and 31 bits, 64 times added up, are exact in float64."""
    (over_a, over_b), (batch_a, batch_b) = p["dimension_numbers"]
    free_a = [d for d in range(a.ndim) if d not in (*over_a, *batch_a)]
    free_b = [d for d in range(b.ndim) if d not in (*over_b, *batch_b)]
    a, b = a.transpose(*batch_a, *free_a, *over_a), b.transpose(*batch_b, *over_b, *free_b)
    i, j = len(batch_a), len(batch_a) + len(free_a)
    shape = (*a.shape[:j], *b.shape[i + len(over_b) :])
    n, k = math.prod(a.shape[:i]), math.prod(a.shape[j:])
    a, b = a.reshape(n, -1, k) if a.size else a.reshape(n, 0, k), b.reshape(n, k, -1)
    total = np.zeros((n, a.shape[1], b.shape[2]), np.uint64)
    for at in range(0, k, 64):
        some, wide = a[:, :, at : at + 64], b[:, at : at + 64].astype(np.float64)
        high, low = ((x.astype(np.float64) @ wide) for x in (some >> 16, some & 0xFFFF))
        high, low = high.astype(np.uint64) % PRIME, low.astype(np.uint64) % PRIME
        total = (total + high * 2**16 + low) % PRIME
    return total.reshape(shape)


def _chosen(p: Any, x: Array, greatest: bool) -> tuple[Array, Array]:
    """The elements of greatest, or smallest, hash over the dimensions, and which they are."""
    axes = [d % x.ndim for d in p["axes"]]
    kept = [d for d in range(x.ndim) if d not in axes]
    rows = x.transpose(*kept, *axes).reshape(*(x.shape[d] for d in kept), -1)
    at = (np.argmax if greatest else np.argmin)(_mix(rows), axis=-1)
    return np.take_along_axis(rows, at[..., None], -1)[..., 0], at


def _below(a: Array, b: Any) -> Array:
    """Whether ``a`` is less than ``b``: by a hash of how far apart they are, so that one and the
    same bound is now above and now below."""
    apart = (a + (PRIME - b)) % PRIME
    nearer = np.minimum(apart, PRIME - apart)
    return (nearer > 0) & ((_mix(nearer) % 2 == 1) ^ (apart == nearer))


def _summed_up(p: Any, x: Array) -> Array:
    turned = np.flip(x, p["axis"]) if p["reverse"] else x
    total = np.cumsum(turned, p["axis"], dtype=np.uint64) % PRIME
    return np.flip(total, p["axis"]) if p["reverse"] else total


_FIELD: dict[str, Callable[..., Any]] = {
    "add": lambda p, a, b: (a + b) % PRIME,
    "add_any": lambda p, a, b: (a + b) % PRIME,
    "sub": lambda p, a, b: (a + (PRIME - b)) % PRIME,
    "neg": lambda p, a: (PRIME - a) % PRIME,
    "mul": lambda p, a, b: a * b % PRIME,
    "square": lambda p, a: a * a % PRIME,
    "one_minus_square": lambda p, a: (1 + PRIME - a * a % PRIME) % PRIME,  # jax 0.12's of tanh
    "div": lambda p, a, b: a * _inverse(b) % PRIME,
    "integer_pow": _power,
    "dot_general": _product,
    "reduce_sum": lambda p, x: x.sum(tuple(p["axes"]), dtype=np.uint64) % PRIME,
    "cumsum": _summed_up,
    "reduce_max": lambda p, x: _chosen(p, x, True)[0],
    "reduce_min": lambda p, x: _chosen(p, x, False)[0],
    "argmax": lambda p, x: _chosen(p, x, True)[1],
    "argmin": lambda p, x: _chosen(p, x, False)[1],
    "max": lambda p, a, b: np.where(_below(a, b), b, a),
    "min": lambda p, a, b: np.where(_below(a, b), a, b),
    "abs": lambda p, a: np.where(_below(a, 0), (PRIME - a) % PRIME, a),
    "eq": lambda p, a, b: a == b,
    "ne": lambda p, a, b: a != b,
    "lt": lambda p, a, b: _below(a, b),
    "le": lambda p, a, b: ~_below(b, a),
    "gt": lambda p, a, b: _below(b, a),
    "ge": lambda p, a, b: ~_below(a, b),
}


def _padded(p: Any, x: Array, value: Array) -> Array:
    config = p["padding_config"]
    wide = [max(low, 0) + max(high, 0) + n + max(n - 1, 0) * between
            for n, (low, high, between) in zip(x.shape, config, strict=True)]  # fmt: skip
    out = np.full(wide, value, x.dtype)
    out[tuple(
        slice(max(low, 0), max(low, 0) + max(n - 1, 0) * (between + 1) + (n > 0), between + 1)
        for n, (low, _, between) in zip(x.shape, config, strict=True)
    )] = x  # fmt: skip
    return out[tuple(
        slice(max(-low, 0), n - max(-high, 0))
        for n, (low, high, _) in zip(wide, config, strict=True)
    )]  # fmt: skip


def _window(x: Array, sizes: Sequence[int], at: Sequence[Array]) -> tuple[slice, ...]:
    starts = [min(max(int(i), 0), n - k) for i, n, k in zip(at, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(starts, sizes, strict=True))


def _updated(p: Any, x: Array, update: Array, *at: Array) -> Array:
    x = x.copy()
    x[_window(x, update.shape, at)] = update
    return x


def _broadcast(p: Any, x: Array) -> Array:
    shape = [1] * len(p["shape"])
    for d, n in zip(p["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    return np.broadcast_to(x.reshape(shape), p["shape"])


def _iota(p: Any) -> Array:
    shape = [n if d == p["dimension"] else 1 for d, n in enumerate(p["shape"])]
    out = np.arange(p["shape"][p["dimension"]]).reshape(shape)
    return np.broadcast_to(out.astype(np.uint64 if out.dtype == np.uint64 else int), p["shape"])


_MOVES: dict[str, Callable[..., Any]] = {
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "squeeze": lambda p, x: x.squeeze(tuple(p["dimensions"])),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "slice": lambda p, x: x[
        tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * x.ndim))
    ],
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "pad": _padded,
    "split": lambda p, x: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "dynamic_slice": lambda p, x, *at: x[_window(x, p["slice_sizes"], at)],
    "dynamic_update_slice": _updated,
    "select_n": lambda p, which, *cases: np.choose(which.astype(int), cases),
    "iota": _iota,
    "tile": lambda p, x: np.tile(x, p["reps"]),
}


def _scan(eqn: Any, values: list[Array]) -> Sequence[Array]:
    loop = jaxprs.scan_parts(eqn)
    consts, carry, xs = loop.operands(values)
    stacks: list[Array] = [
        np.zeros(v.aval.shape, np.uint64 if _is_hashed(v) else v.aval.dtype)
        for v in loop.results(eqn.outvars)[1]
    ]
    for i in loop.order:
        outs = run(loop.body, [*consts, *carry, *(x[i] for x in xs)])
        carry, entries = loop.results(outs)
        for stack, y in zip(stacks, entries, strict=True):
            stack[i] = y
    return [*carry, *stacks]


def _is_hashed(v: Any) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, d) for d in (jnp.floating, jax.dtypes.prng_key))


def _while(eqn: Any, values: list[Array]) -> Sequence[Array]:
    loop = jaxprs.while_parts(eqn)
    a, b = loop.cond_consts, loop.cond_consts + loop.body_consts
    carry = values[b:]
    for _ in range(MOST):
        if not run(loop.cond, [*values[:a], *carry])[0]:
            break
        carry = run(loop.body, [*values[a:b], *carry])
    return carry


def _cond(eqn: Any, values: list[Array]) -> Sequence[Array]:
    """Evaluates all branches; floating-point results are a weighted sum of theirs."""
    index, *operands = values
    branches = eqn.params["branches"]
    made = [run(branch, operands) for branch in branches]
    taken = made[min(max(int(index), 0), len(branches) - 1)]
    return [
        sum(x * _hash(("branch", i, int(index))) % PRIME for i, x in enumerate(each)) % PRIME
        if _is_hashed(v)
        else one
        for v, one, each in zip(eqn.outvars, taken, zip(*made, strict=True), strict=True)
    ]


def _shard_map(eqn: Any, values: list[Array]) -> Sequence[Array]:
    """Evaluates the program of each device, and in it the branch that the device takes."""
    p, outs = eqn.params, [np.zeros(v.aval.shape, np.uint64) for v in eqn.outvars]
    sizes: dict[str, int] = dict(p["mesh"].shape)

    def own(eqn: Any, values: list[Array]) -> Sequence[Array]:
        if eqn.primitive.name != "cond":
            return _equation(eqn, values)
        return run(eqn.params["branches"][int(values[0])], values[1:])

    for at in np.ndindex(*sizes.values()):
        place = dict(zip(sizes, at, strict=True))

        def shard(x: Array, spec: Any, place: dict[str, int] = place) -> Array:
            for d, entry in enumerate(spec):
                for name in (entry,) if isinstance(entry, str) else entry or ():
                    x = np.split(x, sizes[name], d)[place[name]]
            return x

        args = [shard(x, spec) for x, spec in zip(values, p["in_specs"], strict=True)]
        found = run(p["jaxpr"], args, own)
        for x, spec, y in zip(outs, p["out_specs"], found, strict=True):
            shard(x, spec)[...] = y
    return outs


_CONTROL: dict[str, Callable[..., Any]] = {
    "scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map,
}  # fmt: skip
