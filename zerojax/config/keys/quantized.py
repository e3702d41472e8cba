"""Keys of quantized collectives (ZeRO++)."""

from zerojax.config.keys.row import (
    FLAG,
    OBJECT,
    POSITIVE,
    ZERO,
    Key,
    choice,
    off_only,
    optional,
    setting,
)

QUANTIZED: tuple[Key, ...] = (
    setting(
        f"{ZERO}.zero_quantized_weights",
        FLAG,
        False,
        "true: parameters are gathered in 8-bit blocks (qwZ of ZeRO++), which changes numbers",
    ),
    setting(
        f"{ZERO}.zero_quantized_nontrainable_weights",
        FLAG,
        False,
        "true: those are that the optimizer does not update; at rest they are stored as before",
    ),
    setting(
        f"{ZERO}.zero_quantized_weights_dtype",
        choice("int8", "float8_e4m3fn"),
        "int8",
        "zerojax's own key: the codes of these blocks",
        auto="int8",
    ),
    setting(
        f"{ZERO}.zero_quantized_gradients",
        FLAG,
        False,
        "true: gradients are reduced in such blocks (qgZ of ZeRO++), which changes numbers",
    ),
    setting(
        f"{ZERO}.zero_quantized_gradients_dtype",
        choice("int8", "int4"),
        "int8",
        "zerojax's own key: the codes of these blocks",
        auto="int8",
    ),
    setting(
        f"{ZERO}.zero_quantized_block_size",
        optional(POSITIVE),
        None,
        "zerojax's own key: elements that share a scale; null is 256 or so, as divides each array",
        auto="256 or so, as divides each array",
    ),
    *off_only(
        ZERO,
        "zerojax feeds no errors of quantized gradients back; write zero_quantized_gradients "
        "alone, which sends as many bytes",
        zeropp_loco_param=(optional(OBJECT), None),
    ),
)
