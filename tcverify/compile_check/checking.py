"""A pass that is verified on every graph that a compiler gives it."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import fx

from tcverify.application import Guarded, InProcess, LoadedPass, Pair, PassFacts, Subject, load_pass
from tcverify.application.apply import describe_error, returned_module, rewrites_of
from tcverify.application.loading import apply_to_graph, prepare_pass, reference_of, source_hash, takes_graph
from tcverify.capturing.transport import decode_captured, encode_captured
from tcverify.compile_check.graph_facts import (
    JobPlace,
    Placements,
    SharedFacts,
    find_job_place,
    groups_of,
    inputs_of,
    write_annotations,
)
from tcverify.compile_check.judgement import Judgement, JudgingTerms, decode_judgement, encode_judgement
from tcverify.compile_check.judging import judge_pair, pair_key
from tcverify.compile_check.observing import GraphBefore, Observation, decode_observation, encode_observation, is_local
from tcverify.compile_check.pairing import (
    groups_in,
    mesh_for,
    pair_for_all,
    pair_of,
    shared_facts_for_all,
    shared_facts_of,
)
from tcverify.compile_check.pass_calls import (
    PassCall,
    find_result_graph,
    isolate_from_compile,
    record_call,
    restore_graph,
)
from tcverify.compile_check.rank_exchange import RanksMissing, exchange_with_rank_0
from tcverify.compile_check.tally import Tally
from tcverify.errors import ProgramError, TcverifyError, Unsupported, UsageError
from tcverify.execution import Executor
from tcverify.program import Contract, Mesh
from tcverify.registry.choices import DomainName
from tcverify.verification.exceptions import refuted_by
from tcverify.verification.verifier import chosen_checks

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
else:
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:  # an older torch takes any callable
        CustomGraphPass = object

LOG = logging.getLogger("tcverify")

#: Seconds to wait for ranks once some have not shown up in time: they may be out of step from then on.
PATIENCE = 5.0

#: How many checked passes of each name there are: ranks tell calls apart by it.
_NAMES: Counter[str] = Counter()


class CheckedPass(CustomGraphPass):
    """A pass that is verified whenever it is called; made by `checked`, which says what the arguments are.

    Called as the pass is called, and returns what it returns. Attributes that it does not have are those of the pass.
    """

    def __init__(
        self,
        loaded: LoadedPass,
        terms: JudgingTerms,
        *,
        mode: str,
        declared: bool,
        mesh: Mesh | None,
        groups: Mapping[str, str | Sequence[int]],
        placements: Placements,
        cache: bool,
        timeout: float,
        fallback: bool,
    ) -> None:
        self._pass = loaded.call if loaded.stages else loaded.subject
        self._terms = terms
        self._mode, self._fallback = mode, fallback
        self._declared = declared
        self._mesh, self._groups, self._placements = mesh, groups, placements
        self._cache: dict[str, Judgement] | None = {} if cache else None
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        """Nothing has been seen yet, and no other rank has been met."""
        name = self._terms.facts.name
        _NAMES[name] += 1
        self._channel = f"tcverify/{name}/{_NAMES[name]}"
        self._met = 0
        self._told: set[Any] = set()
        self._tally = Tally(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckedPass:
        made = copy.copy(self)
        made._pass = copy.deepcopy(self._pass, memo)
        made._cache = None if self._cache is None else dict(self._cache)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = record_call(args, kwargs)
        place = find_job_place(self._mesh)
        self._tally.calls += 1
        if place.world_size == 1:
            self._tally.unverified += 1
            self._say_once("there is only one rank, so there is nothing to verify: create a process group (a fake one works), "
                           "or pass a mesh to checked")  # fmt: skip
            return self._pass(*args, **kwargs)
        start = perf_counter()
        before = self._before(called, place)
        groups = {} if isinstance(before, Judgement) else before.captured.groups
        before, common = self._common(before, place)
        self._tally.seconds += perf_counter() - start
        try:
            with write_annotations(called.graph, called.owner, place, groups, self._placements, common):
                returned = self._pass(*args, **kwargs)
        except Exception as error:
            self._raised(error, before, place)
            raise
        start = perf_counter()
        judgement = self._judgement(called, returned, before, place)
        self._tally.seconds += perf_counter() - start
        return self._concluded(judgement, called, returned)

    def report(self) -> Tally:
        """What has come of the calls so far. `print` shows it."""
        return copy.deepcopy(self._tally)

    def uuid(self) -> str | None:
        """What Inductor's cache takes the pass for: graphs that come from the cache were verified when they were compiled.

        None, which turns the cache off, where a graph may be kept although it was refuted (mode "log"), and where nothing tells
        one version of the pass from another.
        """
        own = _identity(self._pass, self._terms.facts)
        if own is None or self._mode != "raise":
            return None
        options = (own, self._terms.contract, self._terms.checks, self._terms.domain, str(self._mesh))
        return hashlib.sha256(repr(options).encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy meets the other ranks by a name of its own: the replies to its original stay in the store."""
        self.__dict__.update(state)
        self._begin()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_pass":  # what copying and pickling ask for before there is a pass
            raise AttributeError(name)
        return getattr(self._pass, name)

    # ------------------------------------------------------------------------------------------------- before and after

    def _before(self, called: PassCall, place: JobPlace) -> GraphBefore | Judgement:
        try:
            with isolate_from_compile():
                groups = groups_of(called.graph, place, self._mesh, self._groups)
                return GraphBefore(called, inputs_of(called.graph), groups)
        except Exception as error:  # noqa: BLE001 - whatever the graph holds, the compile goes on
            return self._doubt(error, "not-captured")

    def _common(self, before: GraphBefore | Judgement, place: JobPlace) -> tuple[GraphBefore | Judgement, SharedFacts]:
        """What the ranks have in common, for the pass to know. Where they cannot be asked, nothing can be verified."""
        if isinstance(before, GraphBefore) and is_local(before.captured):
            return before, SharedFacts()
        with isolate_from_compile():
            if place.real:
                self._met += 1
                return self._asked(before, place)
            if isinstance(before, Judgement):
                return before, SharedFacts()
            try:
                mesh = self._mesh or mesh_for(before.captured.groups, place.world_size)
                return before, shared_facts_for_all(before.captured, place.rank, mesh)
            except Exception as error:  # noqa: BLE001 - whatever the graph holds, the compile goes on
                return self._doubt(error, "not-captured"), SharedFacts()

    def _asked(self, before: GraphBefore | Judgement, place: JobPlace) -> tuple[GraphBefore | Judgement, SharedFacts]:
        mine: Any = None
        if isinstance(before, GraphBefore):
            with suppress(TcverifyError):  # the graph cannot travel: what is seen after the pass says so
                mine = encode_captured(before.captured)

        def decide(theirs: list[Any]) -> Any:
            try:
                captures = [decode_captured(one, f"the graph of rank {rank}") for rank, one in enumerate(theirs)]
                return [asdict(common) for common in shared_facts_of(captures, None)]
            except Exception:  # noqa: BLE001 - whatever does not fit shows after the pass, with a reason
                return None

        try:
            found = exchange_with_rank_0(
                f"{self._channel}/{self._met}/before", place.rank, place.world_size, mine, decide, timeout=self._timeout
            )
        except RanksMissing as error:
            self._timeout = min(self._timeout, PATIENCE)
            return Judgement.inconclusive("missing-ranks", str(error)), SharedFacts()
        except Exception as error:  # noqa: BLE001 - a store can fail in many ways; the compile goes on
            return _no_store(error), SharedFacts()
        if found is None:
            return before, SharedFacts()
        return before, SharedFacts(*(tuple(found[place.rank][key]) for key in ("alike", "same_numbers")))

    def _judgement(
        self, called: PassCall, returned: Any, before: GraphBefore | Judgement, place: JobPlace
    ) -> Judgement:
        if isinstance(before, Judgement) and before.doubts[0][0] in _NOBODY_THERE:
            return before
        terms = self._terms_for(called)
        with isolate_from_compile():
            seen = before if isinstance(before, Judgement) else self._seen(called, returned, before, place, terms)
            if isinstance(seen, Observation):
                judgement = self._judged(seen, before, called, place, terms)
                return replace(judgement, changed=judgement.changed or seen.changed)
            local = isinstance(before, GraphBefore) and is_local(before.captured)
            return self._together(seen, place, terms) if place.real and not local else seen

    def _seen(
        self, called: PassCall, returned: Any, before: GraphBefore, place: JobPlace, terms: JudgingTerms
    ) -> Observation | Judgement:
        try:
            rewrites = rewrites_of(self._pass)
            self._tally.rewrites.update(rewrites)
            done = find_result_graph(called, returned, place.rank)
            return before.observe(done, place.rank, metadata=terms.contract.metadata is not False, rewrites=rewrites)
        except Exception as error:  # noqa: BLE001 - whatever the pass left, the compile goes on
            return self._doubt(error, "not-captured")

    def _judged(
        self, seen: Observation, before: GraphBefore | Judgement, called: PassCall, place: JobPlace, terms: JudgingTerms
    ) -> Judgement:
        if seen.local:
            return self._safely(lambda: (pair_of([seen.alone()], None, self._placements), None), terms)
        if not place.real:
            return self._safely(lambda: self._for_all(seen, place, called), terms)
        if isinstance(before, GraphBefore) and is_local(before.captured):
            self._met += 1  # the pass has inserted the first collective: nobody has been asked yet
        return self._together(seen, place, terms)

    def _for_all(self, seen: Observation, place: JobPlace, called: PassCall) -> tuple[Pair, str | None]:
        mesh = self._mesh or mesh_for(groups_in(seen), place.world_size)

        def apply(gm: fx.GraphModule) -> fx.GraphModule:
            made = returned_module(_calling(self._pass, called)(gm), gm, place.rank)
            if not isinstance(made, fx.GraphModule):
                raise ProgramError(made.message)
            return made

        return pair_for_all(seen, place.rank, mesh, self._placements, apply)

    def _safely(self, make: Callable[[], tuple[Pair, str | None]], terms: JudgingTerms) -> Judgement:
        """Make a pair and judge it, unless it is known; what fails is a doubt."""
        try:
            pair, doubt = make()
            key = pair_key(pair, terms) if self._cache is not None else None
            if key is not None and self._cache is not None and key in self._cache:
                return replace(self._cache[key], cached=True)
            judgement = judge_pair(pair, terms, doubt)
            if key is not None and self._cache is not None:
                self._cache[key] = judgement
            return judgement
        except Exception as error:  # noqa: BLE001 - a graph that cannot be judged must not end the compile
            return self._doubt(error, "not-judged")

    def _doubt(self, error: Exception, reason: str) -> Judgement:
        if not isinstance(error, TcverifyError):
            LOG.debug("%s: verification failed", self._tally.name, exc_info=error)
        return Judgement.inconclusive(
            reason, error.message if isinstance(error, TcverifyError) else describe_error(error)
        )

    # ----------------------------------------------------------------------------------------------------------- ranks

    def _together(self, seen: Observation | Judgement, place: JobPlace, terms: JudgingTerms) -> Judgement:
        """Judge what all ranks have seen: rank 0 does, for all."""
        mine: dict[str, Any]
        try:
            mine = (
                {"doubt": encode_judgement(seen)} if isinstance(seen, Judgement) else {"seen": encode_observation(seen)}
            )
        except TcverifyError as error:
            mine = {"doubt": encode_judgement(Judgement.inconclusive("not-portable", error.message))}
        return self._met_with(mine, place, terms)

    def _met_with(self, mine: dict[str, Any], place: JobPlace, terms: JudgingTerms) -> Judgement:
        def decide(theirs: list[Any]) -> Any:
            return encode_judgement(self._decided(theirs, terms))

        try:
            reply = exchange_with_rank_0(
                f"{self._channel}/{self._met}/after", place.rank, place.world_size, mine, decide,
                timeout=self._timeout, extra=terms.minimise,
            )  # fmt: skip
        except RanksMissing as error:
            self._timeout = min(self._timeout, PATIENCE)
            return Judgement.inconclusive("missing-ranks", str(error))
        except Exception as error:  # noqa: BLE001 - a store can fail in many ways; the compile goes on
            return _no_store(error)
        return decode_judgement(reply)

    def _decided(self, theirs: list[Any], terms: JudgingTerms) -> Judgement:
        for rank, one in enumerate(theirs):
            if "raised" in one:
                text = f"pass-raised: the pass raised {one['raised']} on rank {rank}"
                return Judgement("refuted", True, "pass-raised", text, text)
        for rank, one in enumerate(theirs):
            if "doubt" in one:
                known = decode_judgement(one["doubt"])
                return replace(known, doubts=tuple((r, f"{detail} (rank {rank})") for r, detail in known.doubts))

        def make() -> tuple[Pair, str | None]:
            seen = [decode_observation(one["seen"], f"the graph of rank {rank}") for rank, one in enumerate(theirs)]
            return pair_of(seen, None, self._placements), None

        return self._safely(make, terms)

    def _raised(self, error: Exception, before: GraphBefore | Judgement, place: JobPlace) -> None:
        """Note that the pass raised, and let the other ranks know."""
        reason = "declined" if isinstance(error, Unsupported) else "pass-raised"
        if reason == "declined":
            self._count(Judgement.inconclusive(reason, describe_error(error)))
        else:
            text = f"{reason}: the pass raised {describe_error(error)}"
            self._count(Judgement("refuted", False, reason, text, text))
            LOG.error("%s: %s", self._tally.name, text)
        known = before.doubts[0][0] in _NOBODY_THERE if isinstance(before, Judgement) else is_local(before.captured)
        if place.real and not known:
            doubt = encode_judgement(Judgement.inconclusive(reason, describe_error(error)))
            mine = {"doubt": doubt} if reason == "declined" else {"raised": describe_error(error)}
            with suppress(Exception), isolate_from_compile():
                self._met_with(mine, place, self._terms)

    # ----------------------------------------------------------------------------------------------------------- the end

    def _terms_for(self, called: PassCall) -> JudgingTerms:
        """How this call is judged: by what the pass promises, and by how it is called."""
        terms = self._terms
        if called.bare and not self._declared:
            terms = replace(terms, contract=replace(terms.contract, metadata=False))
        facts = terms.facts
        if called.bare and not takes_graph(self._pass):  # a replay would give it a module
            facts = replace(facts, target="")
        return replace(terms, facts=facts, subject=lambda: _subject(self._pass, facts, terms.contract, called))

    def _count(self, judgement: Judgement) -> None:
        tally = self._tally
        tally.changed += judgement.changed
        tally.cached += judgement.cached
        setattr(tally, judgement.status, getattr(tally, judgement.status) + 1)
        for reason, detail in judgement.doubts[:1]:
            tally.doubts[reason] += 1
            tally.details.setdefault(reason, detail)
        if judgement.path and judgement.path not in tally.cases:
            tally.cases.append(judgement.path)

    def _concluded(self, judgement: Judgement, called: PassCall, returned: Any) -> Any:
        self._count(judgement)
        for reason, detail in judgement.doubts:
            self._say_once(f"inconclusive, {reason}: {detail}")
        for note in judgement.notes if judgement.status != "refuted" else ():
            self._say_once(note, logging.INFO)
        LOG.debug("%s: %s, %s", self._tally.name, judgement.status, "changed" if judgement.changed else "unchanged")
        if judgement.status != "refuted":
            return returned
        if self._mode == "raise":
            raise refuted_by(judgement.kind)(judgement.headline, judgement.text)
        LOG.error("%s is refuted\n%s", self._tally.name, judgement.text)
        if not self._fallback:
            return returned
        LOG.error("%s: the compile continues with the graph from before the pass", self._tally.name)
        return restore_graph(called, returned)

    def _say_once(self, text: str, level: int = logging.WARNING) -> None:
        if text not in self._told:
            self._told.add(text)
            LOG.log(level, "%s: %s", self._tally.name, text)


#: Why a graph is inconclusive when the other ranks need not be asked again.
_NOBODY_THERE = ("missing-ranks", "no-store")


def _no_store(error: Exception) -> Judgement:
    return Judgement.inconclusive("no-store", f"the ranks cannot communicate: {describe_error(error)}")


def _calling(pass_: Any, called: PassCall) -> Callable[[fx.GraphModule], Any]:
    """The pass as it was called, for other modules."""
    if called.bare:
        return lambda gm: apply_to_graph(pass_, gm)
    if called.example_inputs is not None:
        return lambda gm: pass_(gm, [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"])
    return pass_  # type: ignore[no-any-return]


def _subject(pass_: Any, facts: PassFacts, contract: Contract, called: PassCall) -> Subject:
    """The pass, for smaller programs: in a process of its own where it can be imported, else a copy of it in this one."""
    if facts.target:
        return Guarded(facts.target, facts.options)
    with suppress(Exception):  # whatever cannot be copied is taken as it is
        pass_ = copy.deepcopy(pass_)
    return InProcess(LoadedPass(_calling(pass_, called), pass_, contract, facts))


def _identity(pass_: Any, facts: PassFacts) -> str | None:
    """What tells one version of a pass from another: its own uuid, else its source and how it is made."""
    own = getattr(pass_, "uuid", None)
    if callable(own):
        made = own()
        return None if made is None else f"uuid {made!r}"
    if not facts.target or not facts.source:
        return None
    return f"{facts.target} {facts.options} {facts.source}"


def checked(
    pass_: Any,
    *,
    mode: str = "raise",
    options: Mapping[str, Any] | None = None,
    checks: Iterable[str] | None = None,
    contract: Contract | None = None,
    domain: DomainName = "float64",
    mesh: Mesh | None = None,
    groups: Mapping[str, str | Sequence[int]] | None = None,
    placements: Placements | None = None,
    report_dir: str | Path | None = "reports",
    cache: bool = True,
    timeout: float = 60.0,
    confirm: Executor | None = None,
    minimise: float = 20.0,
    fallback: bool = False,
) -> CheckedPass:
    """Wrap a pass so that it is verified on every graph of a real compile.

    The result has the signature of the pass (`GraphModule`, module and example inputs, or `Graph`), so it can replace the pass
    anywhere: `post_grad_custom_post_pass` of Inductor, a list of a pass manager, a backend. In a job of several ranks they
    exchange their graphs through the store of the default process group, and rank 0 judges for all. With a fake process group,
    or a `mesh`, the graph of this rank is used for all ranks.

    Args:
        pass_: a pass, its class, or "module:attribute".
        mode: "raise" raises `tcverify.Refuted` on all ranks when a graph refutes the pass, "log" writes to the logger "tcverify".
        options: keyword options for a class or reference.
        checks, domain, confirm: as `verify` takes them; `confirm` runs on rank 0.
        contract: what the pass promises; by default what it declares. Passes that declare nothing and take a `Graph` need not
            keep metadata: Inductor recomputes it.
        mesh: the mesh of the job to compile for, if there is no process group.
        groups: with `mesh`: by name of a group in the graph, the mesh dim that it is, or its ranks.
        placements: of inputs, by name and mesh dim; "*" applies to all inputs with an unknown placement. Inputs that
            stay unknown are treated as equal on all ranks, and the pass is not given their placement.
        report_dir: directory for counterexamples; None writes none.
        cache: verify equal graphs once.
        timeout: seconds to wait for other ranks. If one does not respond, the graph is inconclusive, and later graphs wait for
            at most 5 s: ranks that compile different numbers of graphs stay out of step.
        minimise: time limit for reducing a counterexample, in seconds; 0 turns reduction off.
        fallback: in mode "log", continue with the graph from before a refuted pass.

    Raises:
        PassLoadError: it is not a pass, or cannot be loaded.
        UsageError: an option has an invalid value.
    """
    if mode not in ("raise", "log"):
        raise UsageError(f"there is no mode '{mode}'", "modes are raise and log")
    if fallback and mode != "log":
        raise UsageError("fallback goes with mode='log': mode='raise' ends the compile")
    loaded = _loaded(pass_, dict(options or {}))
    terms = JudgingTerms(
        loaded.facts, contract or loaded.contract, None, minimise, None if report_dir is None else Path(report_dir),
        None if checks is None else chosen_checks(checks), confirm, domain,
    )  # fmt: skip
    declared = contract is not None or isinstance(getattr(loaded.subject, "contract", None), Contract)
    return CheckedPass(
        loaded, terms, mode=mode, declared=declared, mesh=mesh, groups=groups or {}, placements=placements or {},
        cache=cache, timeout=timeout, fallback=fallback,
    )  # fmt: skip


def _loaded(pass_: Any, options: dict[str, Any]) -> LoadedPass:
    if isinstance(pass_, CheckedPass):
        raise UsageError("the pass is checked already")
    if isinstance(pass_, str):
        return load_pass(pass_, options)
    target = reference_of(pass_) if inspect.isclass(pass_) or not options else None
    known = pass_ if inspect.isclass(pass_) or inspect.isroutine(pass_) else type(pass_)
    module = sys.modules.get(getattr(known, "__module__", "") or "")
    if target is None:
        return prepare_pass(pass_, "", options)
    return prepare_pass(pass_, _from_here(target, module), options, source_hash(module))


def _from_here(target: str, module: ModuleType | None) -> str:
    """The reference with the path of its file where that lies below the current directory and only a script's own search path
    leads there: a replay has another one."""
    name, _, attribute = target.partition(":")
    file, here = getattr(module, "__file__", None), Path.cwd()
    path = None if file is None else Path(file).resolve()
    if path is None or "." in name or path.name != f"{name}.py" or path.parent == here:
        return target
    return f"{path.relative_to(here)}:{attribute}" if here in path.parents else target


__all__ = ["CheckedPass", "checked"]
