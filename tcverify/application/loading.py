"""Loads a pass by reference and adapts it to one calling convention: `gm -> gm | None`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import fx

from tcverify.application.pair import PassFacts
from tcverify.errors import PassLoadError, TcverifyError
from tcverify.program import Contract
from tcverify.registry.pipelines import SEPARATOR, stage_options, stage_targets
from tcverify.registry.references import find


@dataclass(frozen=True)
class LoadedPass:
    """A pass, ready to be applied.

    Attributes:
        call: applies it to one rank's graph module.
        subject: the pass itself; `subject.rewrites` is read after a call where it exists.
        contract: the one that it declares, or the default.
        stages: the passes of a pipeline, in order; empty for a single pass.
    """

    call: Callable[[fx.GraphModule], Any]
    subject: Any
    contract: Contract
    facts: PassFacts
    stages: tuple[LoadedPass, ...] = ()


def load_pass(target: str, options: Mapping[str, Any] | None = None) -> LoadedPass:
    """Load the pass at `module:attribute` or `path/file.py:attribute`, or a pipeline of such, joined by "+".

    A class is instantiated with `options` as keyword arguments; a function gets them with every call. Options of a pipeline name
    their stage: see `stage_options`.

    Raises:
        PassLoadError: it cannot be found, imported, instantiated or called as a pass.
    """
    targets = stage_targets(target)
    if len(targets) == 1:
        return _load_one(target, options or {})
    names = [_stage_name(find(one)[0], one) for one in targets]
    return pipeline(
        [_load_one(one, given) for one, given in zip(targets, stage_options(names, options or {}), strict=True)],
        options or {},
    )


def pipeline(stages: Sequence[LoadedPass], options: Mapping[str, Any]) -> LoadedPass:
    """Compose passes that run in sequence into one. Its promises are those that the whole can keep."""

    def call(gm: fx.GraphModule) -> fx.GraphModule:
        for stage in stages:
            returned = stage.call(gm)
            gm = gm if returned is None else getattr(returned, "graph_module", returned)
        return gm

    contracts = [stage.contract for stage in stages]
    contract = Contract(
        metadata=contracts[-1].metadata,  # in between, metadata that is not promised is propagated again
        strict=any(c.strict for c in contracts),
        identity=all(c.identity for c in contracts),
        schedule=any(c.schedule for c in contracts),
        overlap=all(c.overlap for c in contracts),
        boundary="lenient" if any(c.boundary == "lenient" for c in contracts) else "strict",
        inputs="stream0" if any(c.inputs == "stream0" for c in contracts) else "ready",
    )
    facts = PassFacts(
        SEPARATOR.join(stage.facts.name for stage in stages),
        SEPARATOR.join(stage.facts.target for stage in stages) if all(s.facts.target for s in stages) else "",
        dict(options),
        SEPARATOR.join(stage.facts.source for stage in stages),
        asdict(contract),
    )
    return LoadedPass(call, stages[-1].subject, contract, facts, tuple(stages))


def _stage_name(subject: Any, target: str) -> str:
    """The names by which options refer to a stage: the name that a class or an instance declares, or else that of
    the attribute."""
    name = getattr(subject, "name", None)
    return name if isinstance(name, str) and name else target.rpartition(":")[2].split(".")[-1]


def _load_one(target: str, options: Mapping[str, Any]) -> LoadedPass:
    subject, module = find(target)
    return prepare_pass(subject, target, options, source_hash(module))


def prepare_pass(subject: Any, target: str, options: Mapping[str, Any], source: str = "") -> LoadedPass:
    """Make `subject` (a class, an instance or a function) callable as a pass. Raises as `load_pass` does."""
    where = target or getattr(subject, "__qualname__", type(subject).__qualname__)
    if inspect.isclass(subject):
        try:
            subject = subject(**options)
        except TcverifyError as error:
            raise PassLoadError(f"pass '{where}': {error.message}", error.hint) from None
        except Exception as error:
            raise PassLoadError(
                f"pass '{where}' cannot be constructed with options {dict(options)}: {type(error).__name__}: {error}",
                "give the arguments of its constructor with --pass-option name=value",
            ) from error
    elif options and callable(subject):
        subject = functools.partial(subject, **options)
    if not callable(subject):
        raise PassLoadError(f"'{where}' is a {type(subject).__name__}, which cannot be called", _PROTOCOL)
    contract = getattr(subject, "contract", None)
    if not isinstance(contract, Contract):
        contract = Contract()
    name = getattr(subject, "name", None)
    if not isinstance(name, str) or not name:
        plain = subject.func if isinstance(subject, functools.partial) else subject
        name = str(getattr(plain, "__name__", type(plain).__name__))
    facts = PassFacts(name, target, dict(options), source, asdict(contract))
    return LoadedPass(_caller(subject, where), subject, contract, facts)


_PROTOCOL = "a pass takes a GraphModule (and optionally example inputs) or a Graph, and returns one, or None if it works in place"


def _caller(subject: Any, where: str) -> Callable[[fx.GraphModule], Any]:
    """Adapt `gm -> gm`, `gm -> None`, `(gm, example_inputs) -> gm` and `graph -> None` to one form."""
    try:
        parameters = inspect.signature(subject).parameters.values()
    except (TypeError, ValueError):
        return subject  # type: ignore[no-any-return]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    needed = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or needed or not (positional or variadic):
        raise PassLoadError(
            f"'{where}' has the signature {inspect.signature(subject)}, which is not that of a pass", _PROTOCOL
        )
    if positional and takes_graph(subject):
        return lambda gm: apply_to_graph(subject, gm)
    if len(required) == 2:
        return lambda gm: subject(gm, [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"])
    return subject  # type: ignore[no-any-return]


def takes_graph(subject: Any) -> bool:
    """Whether a pass declares that it takes a `Graph`, as Inductor's custom passes do: by annotation, or as
    a `CustomGraphPass`."""
    custom = sys.modules.get("torch._inductor.custom_graph_pass")
    if custom is not None and isinstance(subject, custom.CustomGraphPass):
        return True
    try:
        first = next(iter(inspect.signature(subject).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    said = None if first is None else first.annotation
    return said is fx.Graph or (isinstance(said, str) and said.strip("\"' ").split(".")[-1] == "Graph")


def apply_to_graph(subject: Callable[[fx.Graph], Any], gm: fx.GraphModule) -> Any:
    """Call a pass on the graph of a module; a returned graph is wrapped in a module."""
    returned = subject(gm.graph)
    if isinstance(returned, fx.Graph):
        return gm if returned is gm.graph else fx.GraphModule(gm, returned)
    return returned


def source_hash(module: ModuleType | None) -> str:
    """A hash of the file of a module, or "" if there is none."""
    path = getattr(module, "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    except OSError:
        return ""


def importable_target(subject: Any) -> str | None:
    """Return `module:attribute` if that names `subject` in a fresh process, else None."""
    module, name = getattr(subject, "__module__", None), getattr(subject, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is subject else None


def reference_of(subject: Any) -> str | None:
    """Return `module:attribute` if that names a pass in a fresh process: a function, a class, or an instance equal to
    one constructed without arguments."""
    target = importable_target(subject)
    if target is not None or inspect.isclass(subject) or inspect.isroutine(subject):
        return target
    kind = type(subject)
    target = importable_target(kind)
    if target is None:
        return None
    try:
        return target if bool(vars(kind()) == vars(subject)) else None
    except Exception:  # noqa: BLE001 - it wants arguments, or holds what cannot be compared
        return None
