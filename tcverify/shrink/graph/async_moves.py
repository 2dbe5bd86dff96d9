"""Moves for programs whose collectives start and are waited for, and for ranks that do different things."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.ops import lookup, qualified_name, resolve
from tcverify.program import InputSpec
from tcverify.shrink.graph.async_groups import starts, waits_for
from tcverify.shrink.graph.legalize import constants_of
from tcverify.shrink.graph.moves import substitutes
from tcverify.shrink.graph.named_groups import held_value
from tcverify.shrink.graph.search import SketchSearch
from tcverify.shrink.graph.sketch import AFTER, Ref, Replacements, Sketch, SketchStep, replace_steps
from tcverify.shrink.graph.step_facts import Facts

#: Ways to do without a collective that are tried.
MOST_WAYS = 6


# --------------------------------------------------------------------------------------------------- starts and waits


def bypass_collectives(search: SketchSearch) -> None:
    """Do without a start and all waits for it at once: a wait alone, or a start alone, would make another program of it."""
    for name in reversed(starts(search.facts)):
        if not search.facts.where(name):
            continue
        waits = waits_for(search.facts, name)
        for second in reversed(waits[1:]):
            if search.facts.where(second) and search.facts.replaceable(second, waits[0]):
                search.attempt(replace_steps(search.sketch, {second: Ref(waits[0])}))
        for number, way in enumerate(_ways(search, name)):
            if number >= MOST_WAYS or search.attempt(replace_steps(search.sketch, way)):
                break


def _ways(search: SketchSearch, name: str) -> Iterator[Replacements]:
    """What is read in place of what was waited for."""
    facts = search.facts
    selections = _selections(facts, name)
    options = [list(_options(search, item, name)) for item in selections or [name]]
    if not all(options):
        return
    for number in range(max(map(len, options))):
        mapping: dict[str, Ref | InputSpec | None] = {name: _stand_in(facts, name), **dict.fromkeys(selections)}
        for listed in options:
            mapping.update(listed[min(number, len(listed) - 1)])
        yield mapping


def _selections(facts: Facts, name: str) -> list[str]:
    users = [user for i in facts.where(name) for user in facts.users[i][name]]
    return list(dict.fromkeys(user.name for user in users if user.selects))


def _options(search: SketchSearch, item: str, start: str) -> Iterator[dict[str, Ref | InputSpec | None]]:
    """Ways to do without the waits for one result."""
    facts = search.facts
    waits = [w for w in waits_for(facts, item) if facts.where(w)]
    if not waits:
        yield {}
        return
    read = any(user.name not in waits for wait in waits for i in facts.where(wait) for user in facts.users[i][wait])
    if not read:
        yield dict.fromkeys(waits)
        return
    first, *others = waits
    for one in substitutes(search, first, start):
        if isinstance(one, Ref) and one.name in (start, item):
            continue
        yield {first: one, **{other: Ref(first) for other in others if facts.replaceable(other, first)}}


def _stand_in(facts: Facts, name: str) -> Ref | None:
    """What others than waits read in place of a start that writes into its operand: that operand."""
    step = facts.steps[facts.where(name)[0]][name]
    operand = step.reads[0] if step.reads else None
    if operand is None or not facts.tensor(name) or not facts.replaceable(name, operand):
        return None
    return Ref(operand)


def narrow_coalesced(search: SketchSearch) -> None:
    """Remove operands from a coalesced call; with one operand left it becomes a plain call."""
    for name in reversed(starts(search.facts)):
        again = True
        while again and search.facts.where(name):
            step = search.facts.steps[search.facts.where(name)[0]][name]
            listed = step.args[0] if step.args else None
            count = len(listed) if isinstance(listed, (list, tuple)) else 0
            again = count > 1 and any(search.attempt(*_narrowed(search, name, i)) for i in reversed(range(count)))
            if count == 1:
                search.attempt(_plain_form(search.sketch, name))


def _narrowed(search: SketchSearch, name: str, index: int) -> Iterable[Sketch]:
    facts = search.facts
    steps = facts.steps[facts.where(name)[0]]
    own = [item for item in _selections(facts, name) if steps[item].args[1] == index]
    ways = list(_options(search, own[0], name))[:MOST_WAYS] if own else [{}]
    for way in ways:
        yield _without_operand(replace_steps(search.sketch, {**way, **dict.fromkeys(own)}), name, index)


def _without_operand(sketch: Sketch, name: str, index: int) -> Sketch:
    def changed(step: SketchStep) -> SketchStep:
        if step.name == name:
            listed = step.args[0]
            return replace(step, args=([*listed[:index], *listed[index + 1 :]], *step.args[1:]))
        if step.selects and step.args[:1] == (Ref(name),) and step.args[1] > index:
            return replace(step, args=(Ref(name), step.args[1] - 1))
        return step

    return _each(sketch, changed)


def _plain_form(sketch: Sketch, name: str) -> Sketch | None:
    """The call of one operand in place of the coalesced call of a list of one."""
    items = [s.name for g in sketch.graphs for s in g if s.selects and s.args[:1] == (Ref(name),)]

    def changed(step: SketchStep) -> SketchStep:
        if step.name != name:
            return step
        plain = qualified_name(step.target).replace("_coalesced", "")
        return replace(step, target=resolve(plain), args=(step.args[0][0], *step.args[1:]), meta=_unsaid(step))

    try:
        return replace_steps(_each(sketch, changed), {item: Ref(name) for item in items})
    except UnsupportedOp:
        return None


def _unsaid(step: SketchStep) -> dict[str, Any]:
    """Metadata of a call whose result has another kind now: entries about the result are renewed."""
    said = step.meta.get("val")
    return {**step.meta, "val": said[0]} if isinstance(said, (list, tuple)) and said else step.meta


def write_into_new(search: SketchSearch) -> None:
    """Let collectives that write into a given tensor make a new one."""
    for name in starts(search.facts):

        def changed(step: SketchStep, name: str = name) -> SketchStep:
            if step.name != name or "out" not in step.kwargs:
                return step
            kwargs = {key: value for key, value in step.kwargs.items() if key != "out"}
            return replace(step, target=resolve(qualified_name(step.target).removesuffix("_out")), kwargs=kwargs)

        if any("out" in steps[name].kwargs for steps in search.facts.steps if name in steps):
            search.attempt(_each(search.sketch, changed))


def _each(sketch: Sketch, change: Any) -> Sketch:
    return replace(sketch, graphs=tuple(tuple(map(change, graph)) for graph in sketch.graphs))


# ------------------------------------------------------------------------------------------------------- what differs


def run_one_graph(search: SketchSearch) -> None:
    """Let all ranks run the graph of one of them."""
    for number, graph in enumerate(search.sketch.graphs):
        if len(search.sketch.graphs) < 2:
            return
        needed = constants_of(graph)
        if any(not needed <= binding.constants.keys() for binding in search.sketch.ranks):
            continue
        ranks = tuple(replace(binding, graph=number) for binding in search.sketch.ranks)
        if search.attempt(replace(search.sketch, ranks=ranks)):
            return


def drop_transfers(search: SketchSearch) -> None:
    """Do without sends and the receives that they meet: all of them, or one after the other."""
    found = _matched(search.facts)
    if not found:
        return
    everything = [name for names in found for name in names]
    if search.attempt(replace_steps(search.sketch, dict(_without_transfers(search.facts, everything)))):
        return
    for names in found:
        left = [name for name in names if search.facts.where(name)]
        search.attempt(replace_steps(search.sketch, dict(_without_transfers(search.facts, left))))


def _without_transfers(facts: Facts, names: list[str]) -> Iterator[tuple[str, Ref | None]]:
    for name in names:
        step = facts.steps[facts.where(name)[0]][name]
        users = any(facts.users[i][name] for i in facts.where(name))
        yield name, Ref(step.reads[0]) if users and step.reads else None


def _matched(facts: Facts) -> list[list[str]]:
    """Names of transfers, those together that meet on some ranks: what one rank sends to another arrives in order."""
    sent: dict[tuple[int, int], list[str]] = defaultdict(list)
    received: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, binding in enumerate(facts.sketch.ranks):
        for step in facts.sketch.graphs[binding.graph]:
            if step.op != "call_function" or not lookup(step.target).name.startswith("p2p::") or len(step.args) < 2:
                continue
            try:
                peer = held_value(step.args[1], binding.constants)
            except ProgramError:
                continue
            if lookup(step.target).name == "p2p::send":
                sent[rank, peer].append(step.name)
            else:
                received[peer, rank].append(step.name)
    together: dict[str, set[str]] = {}
    for key in (*sent, *received):
        for name in (*sent[key], *received[key]):
            together.setdefault(name, {name})
    for way, names in list(sent.items()):
        for one, other in zip(names, received[way], strict=False):
            joined = together[one] | together[other]
            for name in joined:
                together[name] = joined
    return [sorted(names) for names in {id(names): names for names in together.values()}.values()]


def drop_declared_order(search: SketchSearch) -> None:
    """Do without the orders that only metadata declares: all of them, or call by call."""
    named = [step.name for graph in search.sketch.graphs for step in graph if step.after]

    def without(names: list[str]) -> Sketch:
        def changed(step: SketchStep) -> SketchStep:
            if step.name not in names:
                return step
            return replace(step, meta={key: value for key, value in step.meta.items() if key != AFTER})

        return _each(search.sketch, changed)

    if named and not search.attempt(without(named)):
        search.in_chunks(dict.fromkeys(named), without)


__all__ = [
    "bypass_collectives", "drop_declared_order", "drop_transfers", "narrow_coalesced", "run_one_graph", "write_into_new",
]  # fmt: skip
