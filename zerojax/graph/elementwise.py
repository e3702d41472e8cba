"""Primitives by what they do to the elements of their operands."""

ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul",
    "name", "ne", "neg", "not", "one_minus_square", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
"""Work element by element."""

LABELS = frozenset({"name", "sharding_constraint", "copy", "copy_p"})
"""Say something of a value, and leave it as it is."""

REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"]
)
"""Of an array in pieces each device reduces its own, and XLA the rest."""
