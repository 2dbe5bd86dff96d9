"""`verifies`: makes a test function verify passes. Needs neither torch nor Hypothesis; nothing is looked at before collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tcverify.registry.choices import DomainName, HostileName

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tcverify.program import Contract, Mesh, Program

#: Attribute of a test function that holds what it was decorated with: one `Verification` per `verifies`.
ATTRIBUTE = "_tcverify"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verification:
    """The arguments of `verifies`, as they were given."""

    passes: tuple[Any, ...]
    programs: Any
    world_sizes: Any
    meshes: Any
    max_examples: Any
    shards: Any
    contract: Any
    pass_options: Any
    checks: Any
    confirm: Any
    domain: Any
    hostile: Any
    pass_timeout: Any
    shrink_time: Any


def verifies(
    *passes: Any,
    programs: SearchStrategy[Program] | Callable[..., SearchStrategy[Program]] | str | None = None,
    world_sizes: Sequence[int] | None = None,
    meshes: Sequence[Mesh | Mapping[str, int]] | None = None,
    max_examples: int | None = None,
    shards: int | None = None,
    contract: Contract | Mapping[str, bool | str | float | None] | None = None,
    pass_options: Mapping[str, Any] | None = None,
    checks: Sequence[str] | None = None,
    confirm: str | None = None,
    domain: DomainName | None = None,
    hostile: Sequence[HostileName] = (),
    pass_timeout: float = 20.0,
    shrink_time: float = 30.0,
) -> Callable[[F], F]:
    """Verify passes on drawn programs: one test item per pass × world × shard.

    Example:
        >>> @tcverify.verifies(MyPass, programs=transformer_programs, world_sizes=(2, 4))
        ... def test_my_pass(verdict):
        ...     assert verdict.share("my-pattern") > 0.25

    Each item runs a campaign. A pass that is refuted, or that nothing tested (no program passed, or the pass changed none;
    passes whose contract says `identity` are exempt), fails the item before the function is called. Otherwise the
    function is called, once per item, with the campaign's `ItemOutcome` as `verdict`, and may assert more about it: how often the
    pass fired, that nothing was inconclusive. It need not take `verdict`. Fixtures, marks and `parametrize` work as on any
    test function; the pass itself runs in a separate process, which fixtures do not affect.

    Each item draws its own programs, the same ones in every run: the seed comes from the item's node id, and from
    `--tcverify-seed`. Programs that failed an item earlier are tried first, until they pass (`--cache-clear` forgets them).

    Args:
        passes: classes, functions or instances, "module:attribute", "path/file.py:attribute", or names of built-in passes.
            Passes that cannot be imported by name (closures, instances) run in the test's process: if one hangs, so does the
            test, and its counterexamples cannot be replayed.
        programs: a function that is called with `mesh` and `world_size`, one of them None, and returns a strategy, such as
            `transformer_programs`; or the name of a strategy of tcverify; or a strategy. A strategy chooses the
            sizes itself: with `world_sizes`, programs of other sizes are discarded; without, all are verified. A function is
            therefore faster. Default: the strategy of `tcverify run`.
        world_sizes: numbers of ranks, at least 2; default 2, 3 and 4, if `programs` is not a strategy.
        meshes: instead of world sizes; a `Mesh`, or sizes by name as in {"dp": 2, "tp": 2}. Not with a strategy, which has
            its own meshes.
        max_examples: programs per item; default from the profile.
        shards: items per pass and world; default from the profile.
        contract: what the passes promise: a `Contract`, or promises by name that change what they declare.
        pass_options: keyword arguments of the passes' constructors, or of the functions.
        checks: names of the checks to apply; default all.
        confirm: "gloo", "cuda", "nccl" or "none": the process group that runs the programs that lockstep does not refute;
            default from `--tcverify-confirm`.
        domain: "float64", "native" or "exact": the number domain that values are judged in (see `verify`); default from
            `--tcverify-domain`.
        hostile: "metadata" draws programs whose metadata is missing or wrong, as `tcverify run --hostile metadata`.
        pass_timeout: time limit for one application of a pass, in seconds.
        shrink_time: time limit for shrinking one finding, in seconds.

    Invalid arguments are collection errors.
    """
    asked = Verification(
        passes, programs, world_sizes, meshes, max_examples, shards, contract, pass_options, checks, confirm,
        domain, hostile, pass_timeout, shrink_time,
    )  # fmt: skip

    def decorate(function: F) -> F:
        setattr(function, ATTRIBUTE, (*getattr(function, ATTRIBUTE, ()), asked))
        return function

    # `@verifies` without parentheses leaves this function in the place of the test: it is recognised by holding nothing.
    setattr(decorate, ATTRIBUTE, ())
    return decorate
