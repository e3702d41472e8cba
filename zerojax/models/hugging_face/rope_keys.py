"""Keys of a `config.json` for rotary positions.

transformers 5 has them in `rope_parameters`; older files have `rope_theta`, and `rope_scaling` for
the rest.

>>> fields = from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8)
>>> fields
{'rope_theta': 500000.0, 'rope_type': 'linear', 'rope_factor': 2.0}
>>> to_hf(RopeConfig(**fields))["rope_parameters"]
{'rope_type': 'linear', 'rope_theta': 500000.0, 'factor': 2.0}
"""

from zerojax.models.config import Fields
from zerojax.models.hugging_face.config_file import Json
from zerojax.models.rope import TYPES, RopeConfig

_PRETRAINED = "original_max_position_embeddings"

_OURS = {"factor": "rope_factor", _PRETRAINED: "original_size"}

# The keys that each type of scaling has, with their fields.
_FIELDS: dict[str, dict[str, str]] = {
    kind: {key: _OURS.get(key, key) for key in keys.split()}
    for kind, keys in {
        "default": "",
        "linear": "factor",
        "dynamic": "factor",
        "llama3": f"factor low_freq_factor high_freq_factor {_PRETRAINED}",
        "longrope": f"factor short_factor long_factor attention_factor {_PRETRAINED}",
        "yarn": "factor attention_factor beta_fast beta_slow truncate mscale mscale_all_dim "
        + _PRETRAINED,
    }.items()
}
_OPTIONAL = {
    "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"
}  # fmt: skip


def from_hf(values: Json, longest: int) -> Fields:
    """Returns the fields of a `RopeConfig`.

    Args:
      values: The values of the `config.json`.
      longest: The number of tokens in the longest row.

    Raises:
      ValueError: The type of scaling, or a key of it, is not supported.
    """
    given: Json = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    fields: Fields = {"rope_theta": given.pop("rope_theta", values.get("rope_theta") or 10000.0)}
    share = given.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        fields["partial_rotary_factor"] = share
    old = given.pop("type", None)
    kind = given.pop("rope_type", old) or "default"
    kind = "longrope" if kind == "su" else kind  # its name in older files
    if kind not in _FIELDS:
        raise ValueError(
            f"rope_type = {kind!r} is not supported: zerojax.models.rope has {', '.join(TYPES)}"
        )
    may_lack_factor = kind == "longrope" or (kind == "yarn" and "factor" in given)
    if may_lack_factor and given.get("factor") is None:
        given["factor"] = longest / (values.get(_PRETRAINED) or given.get(_PRETRAINED) or longest)
    known = _FIELDS[kind]
    if _PRETRAINED in known:
        given[_PRETRAINED] = values.get(_PRETRAINED) or given.get(_PRETRAINED) or longest
    surplus, missing = given.keys() - {*known, _PRETRAINED}, known.keys() - {*given, *_OPTIONAL}
    if surplus or missing:
        problem = f"has no {min(surplus)}" if surplus else f"needs {min(missing)}"
        keys = ", ".join(known) or "no further keys"
        raise ValueError(f"rope_parameters: rope_type = {kind!r} {problem}; it takes {keys}")
    scaling = {field: given[key] for key, field in known.items() if given.get(key) is not None}
    scaling |= {name: tuple(x) for name, x in scaling.items() if isinstance(x, list)}
    return fields | ({} if kind == "default" else {"rope_type": kind}) | scaling


def to_hf(config: RopeConfig) -> Json:
    """Returns the keys for a `config.json`, for old and new versions of transformers."""
    parameters: Json = {"rope_type": config.rope_type, "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = config.partial_rotary_factor
    scaling = {key: getattr(config, field) for key, field in _FIELDS[config.rope_type].items()}
    scaling |= {key: [*x] for key, x in scaling.items() if isinstance(x, tuple)}
    parameters |= {key: x for key, x in scaling.items() if x is not None}
    share = {k: x for k, x in parameters.items() if k == "partial_rotary_factor"}
    old = {k: x for k, x in parameters.items() if k not in ("rope_theta", *share)}
    return {
        "rope_theta": config.rope_theta,
        "rope_parameters": parameters,
        "rope_scaling": old if config.rope_type != "default" else None,
        **share,
    }
