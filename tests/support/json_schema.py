"""As much of JSON Schema as docs/events.schema.json uses, stricter in one thing: fields that it does not name are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "const", "enum", "pattern", "required", "properties",
    "additionalProperties", "items", "allOf", "if", "then",
}  # fmt: skip


def problems(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a value, each with where it is."""
    return list(_problems(value, schema, schema, "$", strict=True))


def parts(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all that it says also applies to the value."""
    assert schema.keys() <= _KNOWN, f"this checker does not know {schema.keys() - _KNOWN}"
    yield schema
    if "$ref" in schema:
        yield from parts(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    for part in schema.get("allOf", ()):
        yield from parts(value, part, root)
    if "if" in schema and not list(_problems(value, schema["if"], root, "", strict=False)):
        yield from parts(value, schema["then"], root)


def _problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, *, strict: bool
) -> Iterator[str]:
    named: set[str] = set()
    free = False
    for part in parts(value, schema, root):
        if "type" in part:
            types = [part["type"]] if isinstance(part["type"], str) else part["type"]
            if not any(isinstance(value, _TYPES[t]) and (t == "boolean" or value.__class__ is not bool) for t in types):
                yield f"{where}: {value!r} is not of type {part['type']}"
        if "const" in part and value != part["const"]:
            yield f"{where}: {value!r} is not {part['const']!r}"
        if "enum" in part and value not in part["enum"]:
            yield f"{where}: {value!r} is not one of {part['enum']}"
        if "pattern" in part and isinstance(value, str) and not re.search(part["pattern"], value):
            yield f"{where}: {value!r} does not look like {part['pattern']}"
        if isinstance(value, list) and "items" in part:
            for i, one in enumerate(value):
                yield from _problems(one, part["items"], root, f"{where}[{i}]", strict=strict)
        if isinstance(value, dict):
            named |= part.get("properties", {}).keys()
            free = free or (part.get("type") == "object" and not {"properties", "allOf", "$ref"} & part.keys())
            yield from (f"{where}: it lacks {name!r}" for name in part.get("required", ()) if name not in value)
            for name, one in part.get("properties", {}).items():
                if name in value:
                    yield from _problems(value[name], one, root, f"{where}.{name}", strict=strict)
            for name in value if "additionalProperties" in part else ():
                yield from _problems(value[name], part["additionalProperties"], root, f"{where}.{name}", strict=strict)
    if isinstance(value, dict) and strict and not free:
        yield from (f"{where}: {name!r} is not documented" for name in value.keys() - named)
