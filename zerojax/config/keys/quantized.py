"""Keys of quantized collectives (ZeRO++)."""

from zerojax.config.keys.loco import LOCO
from zerojax.config.keys.row import FLAG, OFF, POSITIVE, ZERO, Key, choice, optional, setting

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
    setting(
        f"{ZERO}.zeropp_loco_param",
        optional(LOCO),
        None,
        "the error of a quantized gradient is kept on each device, and part of it added to the "
        "next one (LoCo): each device holds unsharded gradients and their errors",
        auto=OFF,
    ),
)
