"""Families of primitives: what each does to the elements of its operands.

Rules that treat primitives alike name a family from here, so that one search for the name of a
primitive finds all that zerojax knows of it.
"""

COPIES = frozenset({"copy", "copy_p"})

LABELS = COPIES | {"name", "sharding_constraint"}
"""Annotate a value, or copy it."""

LINEAR = frozenset({"convert_element_type", "neg"})
"""Of one operand, element by element, and additive: f(a) + f(b) = f(a + b)."""

ADDITIVE = frozenset({"neg", "reduce_sum", "cumsum", "real", "imag", "conj", "reduce_precision"})
"""Of one operand, and additive: f(a) + f(b) = f(a + b)."""

ADDS = frozenset({"add", "add_any"})
SUMS = ADDS | {"sub"}
"""Add two operands, or subtract them."""

ADDITIVE_TOGETHER = SUMS | {"concatenate", "stack"}
"""Of several operands, and additive in all of them together."""

SCALES = frozenset({"mul", "div", "select_n"})
"""Scale each element, or choose it."""

COMPARISONS = frozenset({"clamp", "max", "min", "lt", "le", "gt", "ge"})

ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul",
    "name", "ne", "neg", "not", "one_minus_square", "or", "pow", "reduce_precision", "rem",
    "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
"""Work element by element, on shards too."""

DRAWS = frozenset({
    "random_bits", "random_gamma", "threefry2x32", "philox2x32", "philox4x32",
    "rng_bit_generator", "rng_uniform",
})  # fmt: skip
"""Draw random numbers."""

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
"""Compute a row of their result from that row of their operands."""

REARRANGES = frozenset({"reshape", "split", "squeeze", "transpose"})
"""Have each element of their operand once, at another place."""

RESHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Change the dimensions of an array, and none of its elements."""

SLICES = frozenset({"slice", "dynamic_slice"})
READS = frozenset({"dynamic_slice", "gather"})
"""Read a part of an array, at indices that are computed."""

MOVES = LABELS | RESHAPES | {
    "device_put", "expand_dims", "optimization_barrier", "pvary", "reshard", "rev", "slice",
    "split", "unstack",
}  # fmt: skip
"""Move elements, or leave them."""

MOVES_OR_ROUNDS = MOVES | SLICES | {
    "concatenate", "convert_element_type", "dynamic_update_slice", "pad",
}  # fmt: skip
"""Move, join or round elements."""

ZERO_STAYS = LABELS | RESHAPES | LINEAR | ADDS | {
    "concatenate", "mul", "reduce_sum", "slice",
}  # fmt: skip
"""Return zeros for zeros."""

REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"]
)
"""Each device reduces its shard, and XLA combines the results."""

GENERAL_SUMS = frozenset({"reduce", "reduce_sum"})

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

FACTORIZATIONS = frozenset({
    "cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip
"""Work on the last two dimensions, for each entry of those before."""

CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"})
"""Work along one dimension, which they keep."""

WINDOWS = frozenset({
    "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
    "select_and_gather_add", "select_and_scatter", "select_and_scatter_add",
})  # fmt: skip

SCATTER_ADDS = frozenset({"scatter-add", "scatter_add"})
LOOKUPS = SCATTER_ADDS | {"gather"}
"""Look up entries of an array, or add to them."""

OVERWRITES = frozenset({"scatter", "scatter-mul"})
"""Write entries of an array, or scale them."""

SCATTERS = SCATTER_ADDS | OVERWRITES | {
    "scatter-max", "scatter-min", "scatter-sub", "scatter_max", "scatter_min", "scatter_mul",
    "scatter_sub",
}  # fmt: skip

BRANCHES = frozenset({"cond", "while"})
"""Run programs that the values of the step choose."""

KERNELS = frozenset({
    "custom_partitioning", "ffi_call", "mosaic_gpu", "mosaic_gpu_call", "pallas_call",
    "shard_map", "core_map", "cudnn_fused_attention", "custom_call",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd", "dot_product_attention_bwd", "scaled_matmul_wrapper",
})  # fmt: skip
"""Assumed to treat each row by itself, and to sum gradients over rows."""

CALLBACKS = frozenset({"pure_callback", "io_callback"})
"""Functions of Python, of which nothing is known."""

NEVER_ON_LANES = DRAWS | {"conv_general_dilated"}
"""The same noise on all lanes; and the gradient of a convolution becomes one of many groups."""

NOT_ON_LANES = NEVER_ON_LANES | BRANCHES | {
    "custom_partitioning",
    "pallas_call",
    "pure_callback",  # only as its vmap_method has it
    "ragged_dot_general",
    "shard_map",  # has the lanes' axes in use
}  # fmt: skip
"""Not run side by side: those, both branches, or slower."""
