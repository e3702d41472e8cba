"""Families of primitives, by their effect on the elements of their operands.

Rules that treat primitives alike use a family of this module, so that one search for the name of a
primitive finds all that zerojax knows of it.
"""

CAST = "convert_element_type"

COPIES = frozenset({"copy"})

LABELS = COPIES | {"name", "sharding_constraint"}
"""Primitives that annotate a value, or copy it."""

LINEAR = frozenset({"convert_element_type", "neg"})
"""Primitives of one operand, element by element, and additive: f(a) + f(b) = f(a + b)."""

# Differentiation adds the cotangents of several uses of a value by add_any.
ADDS = frozenset({"add", "add_any"})
SUMS = ADDS | {"sub"}
"""Primitives that add two operands, or subtract them."""

ADDITIVE = SUMS | {
    "concatenate", "conj", "cumsum", "imag", "neg", "pad", "real", "reduce_precision", "reduce_sum",
    "stack",
}  # fmt: skip
"""Primitives that are additive in all their operands together: f(a, c) + f(b, d) =
f(a + b, c + d)."""

SCALES = frozenset({"mul", "div", "select_n"})
"""Primitives that scale each element, or select it."""

COMPARISONS = frozenset({"clamp", "max", "min", "lt", "le", "gt", "ge"})

# Of these, jax 0.10 lacks log2 and one_minus_square.
ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul",
    "name", "ne", "neg", "not", "one_minus_square", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
"""Primitives that work element by element, so that each device can run them on its shard."""

DRAWS = frozenset({
    "random_bits", "random_gamma", "threefry2x32", "philox2x32", "philox4x32",
    "rng_bit_generator", "rng_uniform",
})  # fmt: skip
"""Primitives that draw random numbers."""

BY_ROW = ELEMENTWISE | LABELS | {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "clz", "complex", "conj", "device_put", "digamma", "eq_to", "erf_inv",
    "erfc", "from_edtype", "igamma", "igamma_grad_a", "igammac", "imag", "layout_constraint",
    "le_to", "lgamma", "lt_to", "mulhi", "nextafter", "philox2x32", "philox4x32", "polygamma",
    "population_count", "pvary", "random_bits", "random_clone", "random_fold_in", "random_gamma",
    "random_seed", "random_split", "random_unwrap", "random_wrap", "real",
    "regularized_incomplete_beta", "reshard", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sinh", "stage", "threefry2x32", "threefry4x32", "tie", "to_edtype",
    "with_memory_space_constraint", "xla_metadata_value", "zeta",
}  # fmt: skip
"""Primitives that compute a row of their result from the same row of their operands."""

REARRANGES = frozenset({"reshape", "split", "squeeze", "transpose"})
"""Primitives that return each element of their operand once, at another place."""

RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that change the dimensions of an array, and none of its elements."""

SLICES = frozenset({"slice", "dynamic_slice"})
READS = frozenset({"dynamic_slice", "gather"})
"""Primitives that read a part of an array, at computed indices."""

MOVES = LABELS | RESHAPES | {
    "device_put", "optimization_barrier", "pvary", "reshard", "rev", "slice",
    "split", "unstack",
}  # fmt: skip
"""Primitives that move elements, or leave them unchanged."""

MOVES_OR_ROUNDS = MOVES | SLICES | {
    "concatenate", "convert_element_type", "dynamic_update_slice", "pad",
}  # fmt: skip
"""Primitives that move, join or round elements."""

ZERO_STAYS = LABELS | RESHAPES | LINEAR | ADDS | {
    "concatenate", "mul", "reduce_sum", "slice",
}  # fmt: skip
"""Primitives that return zeros for zeros."""

REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"]
)
"""Reductions: each device reduces its shard, and XLA combines the results."""

CONTRACTIONS = frozenset({"dot_general"})
"""Products of two arrays, see :mod:`zerojax.graph.contractions`."""

PRODUCTS = CONTRACTIONS | {"conv_general_dilated"}

BILINEAR = CONTRACTIONS | {"mul"}
"""Primitives of two operands, and additive in each of them: f(a, c) + f(b, c) = f(a + b, c)."""

FACTORIZATIONS = frozenset({
    "cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip
"""Primitives that work on the last two dimensions, for each entry of those before."""

CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"})
"""Primitives that work along one dimension, which they keep."""

WINDOWS = frozenset({
    "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add",
})  # fmt: skip

# JAX names scatters with a hyphen, and all other primitives with underscores.
SCATTER_ADDS = frozenset({"scatter-add"})
"""Primitives that add to entries of an array."""

OVERWRITES = frozenset({"scatter", "scatter-mul"})
"""Primitives that write entries of an array, or scale them."""

SCATTERS = SCATTER_ADDS | OVERWRITES | {"scatter-max", "scatter-min", "scatter-sub"}

BRANCHES = frozenset({"cond", "while"})
"""Primitives that run programs chosen by values of the step."""

KERNELS = frozenset({
    "custom_partitioning", "ffi_call", "pallas_call", "mpmd_map", "shard_map", "core_map",
    # jax.nn.dot_product_attention with cuDNN binds the wrappers, which lower to the others.
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd", "dot_product_attention_bwd", "scaled_matmul_wrapper",
})  # fmt: skip
"""Kernels, which are assumed to treat each row separately, and to sum gradients over rows."""

CALLBACKS = frozenset({"pure_callback", "io_callback"})
"""Calls of Python functions, of which nothing is known."""

NEVER_ON_LANES = DRAWS | {"conv_general_dilated"}
"""Primitives that never run on lanes: draws would be the same on all lanes, and the gradient of a
convolution would become a convolution of many groups."""

NOT_ON_LANES = NEVER_ON_LANES | BRANCHES | {
    "custom_partitioning",
    "pallas_call",
    "pure_callback",  # vmap runs it only as its vmap_method says
    "ragged_dot_general",
    "shard_map",  # may use the lanes' axes itself
}  # fmt: skip
"""Primitives that lanes do not run side by side: ``NEVER_ON_LANES``, branches (``jax.vmap`` would
run both), and primitives that ``jax.vmap`` cannot batch or slows down."""
