"""Registries: objects by name, each imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

#: Marks an entry that is not imported yet.
_LATER: Any = object()


class Registry(MutableMapping[str, T]):
    """Objects by name, in the order of registration. Listing names imports nothing; an object is imported when it is looked up.

    Args:
        references: the built-in objects, as "module:attribute".

    Attributes:
        references: the same; without objects registered by extensions.

    Example:
        >>> checks = Registry({"purity": "tcverify.checks.purity:check_purity"})
        >>> checks["mine"] = my_check
        >>> list(checks)
        ['purity', 'mine']
    """

    def __init__(self, references: Mapping[str, str]) -> None:
        self.references: Mapping[str, str] = MappingProxyType(dict(references))
        self._things: dict[str, T] = dict.fromkeys(references, _LATER)

    def __getitem__(self, name: str) -> T:
        thing = self._things[name]
        if thing is _LATER:
            module, _, attribute = self.references[name].partition(":")
            thing = self._things[name] = getattr(importlib.import_module(module), attribute)
        return thing

    def __setitem__(self, name: str, thing: T) -> None:
        self._things[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def clear(self) -> None:
        """Forget all names, including built-in ones."""
        self._things.clear()

    def load(self) -> None:
        """Import everything now, for processes that are forked later."""
        for name in self:
            self[name]

    def __repr__(self) -> str:
        return f"Registry({', '.join(self)})"


__all__ = ["Registry"]
