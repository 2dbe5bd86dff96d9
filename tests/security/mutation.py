"""Files that are nearly right: real ones with something in them replaced, moved, doubled or taken away.

Bytes that are changed at random are no JSON, and stay in the parser. What is changed here stays JSON, and comes deep into
readers.
"""

from __future__ import annotations

import copy
import random
from typing import Any

#: Texts that act on what shows or runs them: HTML, JavaScript, Markdown, terminals, XML, paths, Python, formats.
HOSTILE_TEXTS = (
    "</script><img src=x onerror=alert(1)>",
    "\"'&<!--]]>",
    "javascript:alert(1)",
    "` ``` [x](javascript:alert) <b> | \n# head",
    "\x1b[2J\x1b]0;title\x07",
    "\x00\ufffe\ud800",
    "\u202egnp.exe",
    "../../../etc/passwd",
    "/etc/passwd",
    "'''\"\"\"\\\nimport os",
    "{0} {x!r} %s %(x)s",
    "[red]x[/red]",
    "aten::__class__",
    "python::eval",
    "",
    "x" * 2000,
)

#: Values that are at the edge of something.
EDGES = (
    None, True, False, 0, 1, -1, 2, 63, 64, 1 << 20, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 1 << 64, 10**30, 0.0, -0.0, 0.5,
    1e308, 5e-324, [], {}, [[]], [{}], {"node": "x"}, {"tuple": []}, {"slice": [None, None, 0]}, {"float": "nan"},
    {"float": "-inf"}, {"dtype": "bool"}, {"dtype": "complex64"}, {"dict": []}, {"rank_constant": "rank"}, {"ellipsis": True},
    "float64", "bool", "shard(0)", "partial", "rank", "x", "output",
)  # fmt: skip


def mutated(data: Any, rng: random.Random, changes: int = 3) -> Any:
    """Return a copy of JSON-able data with up to so many changes. The same `rng` gives the same copy."""
    root = [copy.deepcopy(data)]
    for _ in range(rng.randint(1, changes)):
        places = _places(root)
        parent, key = rng.choice(places)
        _change(parent, key, rng, places)
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every place of a value: its container, and its index or key."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        parent = waiting.pop()
        for key in range(len(parent)) if isinstance(parent, list) else list(parent):
            found.append((parent, key))
            if isinstance(parent[key], (list, dict)):
                waiting.append(parent[key])
    return found


def _change(parent: Any, key: Any, rng: random.Random, places: list[tuple[Any, Any]]) -> None:
    value = parent[key]
    kind = rng.randrange(7)
    if kind == 0:
        parent[key] = rng.choice(HOSTILE_TEXTS)
    elif kind == 1:
        other, place = rng.choice(places)
        parent[key] = copy.deepcopy(other[place])  # of another kind, or of the same one from elsewhere
    elif kind == 2 and isinstance(value, (int, float)) and not isinstance(value, bool):
        parent[key] = rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value)))
    elif kind == 3 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        parent[key] = value[:at] + rng.choice(HOSTILE_TEXTS) + value[at + rng.randint(0, 1) :]
    elif kind == 4 and isinstance(parent, dict):
        del parent[key]
    elif kind == 4 and len(parent) > 1:
        parent.insert(rng.randrange(len(parent)), copy.deepcopy(value))
    elif kind == 5 and isinstance(parent, dict):
        parent[rng.choice(HOSTILE_TEXTS)] = parent.pop(key)
    elif kind == 5 and isinstance(value, list):
        rng.shuffle(value)
    else:
        parent[key] = copy.deepcopy(rng.choice(EDGES))
