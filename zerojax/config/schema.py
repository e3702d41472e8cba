"""The JSON schema of a config, with which editors complete and check keys, and a table of settings.

`python -m zerojax.config.schema > configs/schema/config.json` writes the schema, and
`python -m zerojax.config.schema table` prints the table of docs/configuration.md.
"""

import json
import sys
from typing import Any

from zerojax.config.errors import as_text
from zerojax.config.keys import ALIASES, KEYS, SWITCHES
from zerojax.config.row import REQUIRED, ZERO, Key
from zerojax.config.sections import NULLABLE
from zerojax.config.settings import BY_FIELD, SECTIONS


def schema() -> dict[str, Any]:
    """Returns the schema: every key that zerojax knows, with its kind, default and treatment.

    Example:
      >>> schema()["properties"]["gradient_clipping"]["default"]
      1.0
    """
    root = _section("")
    for path, key in KEYS.items():
        *outer, name = path.split(".")
        target = root
        for depth, section in enumerate(outer, 1):
            inner = _section(".".join(outer[:depth]))
            target = target["properties"].setdefault(section, inner)
        target["properties"][name] = _value(key)
    for old, new in ALIASES.items():
        section, _, name = old.rpartition(".")
        names = (root["properties"][section] if section else root)["properties"]
        names[name] = {**names[new.rpartition(".")[2]], "deprecated": True}
    for old, new in SWITCHES.items():
        text = {"description": f"a flag for {new}", "deprecated": True}
        root["properties"][ZERO]["properties"][old.rpartition(".")[2]] = text
    root["properties"]["$schema"] = {"type": "string"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **root}


def _section(path: str) -> dict[str, Any]:
    # DeepSpeed once wrote the stage as "zero_optimization": true.
    other = ["null"] if path in NULLABLE else ["boolean"] if path == ZERO else []
    return {"type": ["object", *other], "properties": {}, "additionalProperties": False}


def _value(key: Key) -> dict[str, Any]:
    if key.treatment != "honoured":
        return {"description": f"{key.treatment}: {key.why}"}
    default = {} if key.default is REQUIRED else {"default": key.default}
    text = key.kind.says if key.default is REQUIRED else key.why
    return {"description": text, **default, "anyOf": [key.kind.schema, {"const": "auto"}]}


def table() -> str:
    """Returns the fields of `ZeroConfig` with their keys as rows of Markdown."""
    rows = [(name, key.path, key.default, key.why) for name, key in BY_FIELD.items()]
    rows += [(name, place.path, None, place.why) for name, place in SECTIONS.items()]
    return "\n".join(f"| `{a}` | `{b}` | {as_text(c)} | {why} |" for a, b, c, why in rows)


if __name__ == "__main__":
    print(table() if "table" in sys.argv else json.dumps(schema(), indent=1))
