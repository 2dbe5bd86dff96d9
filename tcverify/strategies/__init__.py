"""Hypothesis strategies that draw programs.

| name | draws |
|---|---|
| structured | tensor-parallel transformers of 1 to 4 layers |
| near-miss | structured programs with up to three mutations, each of which may break a pass |
| aimed | small programs: a pattern of sequence parallelism up to some element, and an unusual change there |
| moe | layers with mixture of experts, and attention that every rank computes in full |
| wild | typed random graphs without the structure of a model |
| overlap | branches of compute and communication that hardly depend on each other, with costs of their ops and stream settings |
| functional | programs whose collectives start and are waited for later, with opaque communication and writes around them |
| data-parallel | functional programs that begin with layers, their gradients and the reductions of those |
| traced | functional programs as compilers get them from AOTAutograd: no writes, no opaque ops |
| peephole | small patterns that can be simplified: collectives with one difference, in chains, divided; views, dead code |
| gram | rows that are gathered for Gram matrices of them, and divided again, as optimizers do with divided gradients |
| async-tp | functional programs that begin with chunked matrix products, each overlapped with the collective of another |
| bucketing | many small collectives of several kinds, groups and dtypes, in functional graphs |
| effects | opaque sends, receives and barriers among collectives, which some ranks do in another order |
| fsdp | layers whose parameters are gathered, used and freed, and gradients that are reduced and scattered |
| sequence-functional | tensor-parallel layers on functional collectives, with norms as compilers capture them |
| compiled | functional programs, as compilers hand them to their passes: copies into inputs at the end |
| resharding | tensors that are moved between meshes, resharded, reduced, and computed with in between |
| dtensor | ops of all kinds on whole tensors, with placements for DTensor to shard them by |
| cross-entropy | a loss and its gradient on whole tensors, with placements that shard the classes |
| pipelining | training steps of models in stages, with a schedule of pipeline parallelism for each |
| training | training steps of such models, on rows that each rank has of its own |
| tensor-parallel | the same, with ranks of tensor parallel that have the same rows |
| gradients | forward passes with collectives, and their gradients |
| attention | models that attend to a whole sequence, and their gradients |
| mixed | most of these, with costs and stream settings; a third are structured, close to a fifth asynchronous |

Every drawn program is well-typed: it runs in lockstep on every rank, and its outputs are finite. Its metadata is correct, unless
`with_hostile_metadata` is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from hypothesis import strategies as st

from tcverify.errors import UsageError
from tcverify.program import Mesh, Program
from tcverify.registry import strategies as named
from tcverify.registry.extensions import require_new
from tcverify.registry.registry import Registry
from tcverify.registry.strategies import DEFAULT_STRATEGY, SEPARATOR, join_strategy_names
from tcverify.strategies import timing
from tcverify.strategies.argument_forms import with_argument_forms
from tcverify.strategies.choices import WIDTH, decode_choices, weighted_table
from tcverify.strategies.dtensor.losses import cross_entropy_programs
from tcverify.strategies.dtensor.programs import dtensor_programs
from tcverify.strategies.fsdp.programs import WIDTH as FSDP_WIDTH
from tcverify.strategies.fsdp.programs import decode_fsdp
from tcverify.strategies.functional import bucketing, compiled, gram_matrices, peephole
from tcverify.strategies.functional.programs import WIDTH as FUNCTIONAL_WIDTH
from tcverify.strategies.functional.programs import (
    decode_async_tp,
    decode_data_parallel,
    decode_effects,
    decode_functional,
    decode_traced,
)
from tcverify.strategies.meshes import WORLD_SIZES, all_meshes
from tcverify.strategies.registered import Factory, make_strategy
from tcverify.strategies.resharding.programs import RESHARDING_WORLD_SIZES, decode_resharding, plan_of
from tcverify.strategies.resharding.programs import WIDTH as RESHARDING_WIDTH
from tcverify.strategies.sequence_parallel.programs import WIDTH as SEQUENCE_WIDTH
from tcverify.strategies.sequence_parallel.programs import decode_sequence_functional
from tcverify.strategies.training.attention import attention_programs
from tcverify.strategies.training.collectives import gradients_programs
from tcverify.strategies.training.data_parallel import tensor_parallel_programs, training_programs
from tcverify.strategies.training.pipelines import pipelining_programs
from tcverify.strategies.transformer import aimed, experts, near_miss, overlap
from tcverify.strategies.transformer.programs import finish_program, write_program
from tcverify.strategies.wild.programs import WIDTH as WILD_WIDTH
from tcverify.strategies.wild.programs import decode_wild


def decode(mesh: Mesh, choices: bytes, times: int = 1) -> Program:
    """Decode any bytes into a program on `mesh`; `b""` gives the smallest one. Equal arguments give equal programs.

    Args:
        times: factor of the sizes of activations; see `decode_choices`.
    """
    return finish_program(write_program(mesh, *decode_choices(choices, times)))


@dataclass(frozen=True, slots=True)
class Decoder:
    """Builds programs from bytes, as `decode` does.

    Attributes:
        width: how many bytes it reads.
    """

    decode: Callable[[Mesh, bytes], Program]
    width: int


_PARTS = {
    "structured": Decoder(decode, WIDTH),
    "near-miss": Decoder(near_miss.decode_near_miss, near_miss.WIDTH),
    "aimed": Decoder(aimed.decode_aimed, aimed.WIDTH),
    "wild": Decoder(decode_wild, WILD_WIDTH),
    "moe": Decoder(experts.decode_experts, experts.WIDTH),
    "overlap": Decoder(overlap.decode_overlap, overlap.WIDTH),
}
#: Programs with asynchronous collectives.
_ASYNCHRONOUS = {
    "functional": Decoder(decode_functional, FUNCTIONAL_WIDTH),
    "traced": Decoder(decode_traced, FUNCTIONAL_WIDTH),
    "peephole": Decoder(peephole.decode_peephole, peephole.WIDTH),
    "gram": Decoder(gram_matrices.decode_gram, gram_matrices.WIDTH),
    "data-parallel": Decoder(decode_data_parallel, FUNCTIONAL_WIDTH),
    "async-tp": Decoder(decode_async_tp, FUNCTIONAL_WIDTH),
    "bucketing": Decoder(bucketing.decode_bucketing, bucketing.WIDTH),
    "fsdp": Decoder(decode_fsdp, FSDP_WIDTH),
    "sequence-functional": Decoder(decode_sequence_functional, SEQUENCE_WIDTH),
    "compiled": Decoder(compiled.decode_compiled, compiled.WIDTH),
    "effects": Decoder(decode_effects, FUNCTIONAL_WIDTH),
}

#: Programs whose tensors carry layouts.
_PLACED = {"resharding": Decoder(decode_resharding, RESHARDING_WIDTH)}

#: Choices of the first byte of a mixed program: blocking collectives, simplest first, then layouts, and in the end
#: asynchronous ones.
_BLOCKING = weighted_table(("structured", 8), ("near-miss", 4), ("aimed", 2), ("wild", 2), ("overlap", 3))
_SHARES = (
    _BLOCKING * 9
    + weighted_table(("structured", 5), ("near-miss", 2), ("moe", 12))
    + weighted_table(
        ("resharding", 16), ("overlap", 3), ("functional", 29), ("peephole", 4), ("sequence-functional", 6), ("fsdp", 8)
    )
)


def _decode_mixed(mesh: Mesh, choices: bytes, *, any_mesh: bool = True) -> Program:
    """Decode bytes.

    Args:
        any_mesh: whether only the number of ranks counts, so that programs may use other meshes.
    """
    part = _SHARES[(choices[0] if choices else 0) % len(_SHARES)]
    if part in _PLACED and not any_mesh:
        part = "overlap"
    program = {**_PARTS, **_ASYNCHRONOUS, **_PLACED}[part].decode(mesh, choices[1 + timing.WIDTH :])
    costs = choices[1 : 1 + timing.WIDTH]
    return program if part in _TIMED else timing.with_timing(program, timing.decode_timing(costs))


#: Strategies whose programs come with costs.
_TIMED = ("overlap", *_ASYNCHRONOUS)

#: Decoders from bytes to programs, by the name of the strategy.
DECODERS: dict[str, Decoder] = {
    **_PARTS,
    **_ASYNCHRONOUS,
    **_PLACED,
    "mixed": Decoder(_decode_mixed, 1 + timing.WIDTH + max(part.width for part in _PARTS.values())),
}


def _decoder(name: str, *, any_mesh: bool) -> Decoder:
    """The decoder of a strategy, or of several: the first byte picks one of them.

    Args:
        any_mesh: as of `_decode_mixed`.
    """
    parts = name.split(SEPARATOR)
    if len(parts) == 1:
        decoder = DECODERS[name]
        return replace(decoder, decode=partial(_decode_mixed, any_mesh=any_mesh)) if name == "mixed" else decoder
    decoders = [_decoder(part, any_mesh=any_mesh) for part in parts if any_mesh or part not in _PLACED]

    def decode_one(mesh: Mesh, choices: bytes) -> Program:
        return decoders[choices[0] % len(decoders)].decode(mesh, choices[1:])

    return Decoder(decode_one, 1 + max(decoder.width for decoder in decoders))


def _programs(name: str, mesh: Mesh | None, world_size: int | None) -> st.SearchStrategy[Program]:
    decoder = _decoder(name, any_mesh=mesh is None)
    sizes = WORLD_SIZES if world_size is None else (world_size,)
    listed = [mesh] if mesh is not None else [one for size in sizes for one in all_meshes(size)]

    def decode_with_mesh(choices: bytes) -> Program:
        program = decoder.decode(listed[choices[0] % len(listed)], choices[1:-1])
        return with_argument_forms(program, choices[-1])

    # One draw of bytes, the mesh included. For integers, Hypothesis would add constants that it finds in source files, so that a
    # seed would draw different programs after any change of a module.
    return st.binary(min_size=decoder.width + 2, max_size=decoder.width + 2).map(decode_with_mesh)


def transformer_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw tensor-parallel transformer programs of 1 to 4 layers; about 5 % are degenerate on purpose.

    Args:
        mesh: what they run on; None draws one.
        world_size: of the drawn mesh (see `all_meshes`); None draws 2, 3 or 4.
    """
    return _programs("structured", mesh, world_size)


class _Drawing(Protocol):
    def __call__(self, mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]: ...


def _drawing(name: str, what: str) -> _Drawing:
    """Return the factory of the strategy of this name."""

    def programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
        return _programs(name, mesh, world_size)

    programs.__name__ = programs.__qualname__ = f"{name.replace('-', '_')}_programs"
    programs.__doc__ = f"Draw {what}. Arguments as of `transformer_programs`."
    return programs


near_miss_programs = _drawing("near-miss", "transformer programs with up to three mutations")
aimed_programs = _drawing("aimed", "small programs that pass or fail one guard of a pattern")
moe_programs = _drawing("moe", "layers with mixture of experts")
wild_programs = _drawing("wild", "typed random graphs")
overlap_programs = _drawing("overlap", "programs whose communication can run beside compute, with costs")
fsdp_programs = _drawing("fsdp", "programs of sharded parameters, as traced FSDP has them")
mixed_programs = _drawing("mixed", "programs of all kinds, a third of them structured")
functional_programs = _drawing("functional", "programs with asynchronous collectives of all kinds")
traced_programs = _drawing("traced", "asynchronous programs without writes and effects")
gram_programs = _drawing("gram", "optimizer steps on Gram matrices of gathered rows")
peephole_programs = _drawing("peephole", "the patterns that peephole passes look for")
data_parallel_programs = _drawing("data-parallel", "gradients that are reduced while others are computed")
sequence_functional_programs = _drawing(
    "sequence-functional", "tensor-parallel layers on functional collectives, as captured models have them"
)
effects_programs = _drawing("effects", "sends, receives and barriers among collectives")
async_tp_programs = _drawing("async-tp", "products in chunks beside their collectives")
bucketing_programs = _drawing("bucketing", "collectives that a compiler puts into buckets")
compiled_programs = _drawing("compiled", "functional programs, as compilers hand them to passes")


def resharding_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw programs whose tensors have their own meshes.

    Args:
        mesh: of which the number of ranks counts.
        world_size: any; None draws 2 to 6.
    """
    size = mesh.world_size if mesh is not None else world_size
    sizes = RESHARDING_WORLD_SIZES if size is None else (size,)
    width = RESHARDING_WIDTH

    def decode_with_size(choices: bytes) -> Program:
        return plan_of(sizes[choices[0] % len(sizes)], choices[1:]).build()

    return st.binary(min_size=width + 1, max_size=width + 1).map(decode_with_size)


#: Strategies by the name that `--strategy` takes; each is called like `transformer_programs`.
STRATEGIES: Registry[Callable[..., st.SearchStrategy[Program]]] = named.STRATEGIES


def register_strategy(name: str, programs: Factory) -> None:
    """Add a strategy of your own: `--strategy` and `programs=` of `verifies` can name it.

    Args:
        name: its name. An earlier registration of this name is replaced.
        programs: called like `transformer_programs`, with `mesh` and `world_size`, one of them None; returns a Hypothesis
            strategy of programs on that mesh, or of that many ranks.

    Raises:
        UsageError: the name is taken or invalid, or `programs` is not callable.

    Example:
        >>> def sums(mesh=None, world_size=None):
        ...     mesh = mesh or Mesh.grid({"tp": world_size or 2})
        ...     x = InputSpec("x", (4, 8), placements=((mesh.dims[0].name, PARTIAL),))
        ...     reduce = lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group(mesh.dims[0].name))
        ...     return st.integers(0, 99).map(lambda seed: spmd_program(mesh, [x], reduce, seed=seed))
        >>> register_strategy("sums", sums)
    """
    require_new("strategy", name, STRATEGIES.references)
    if not callable(programs):
        what = f"strategy '{name}' is a {type(programs).__name__}, which cannot be called"
        raise UsageError(what, "give the function that makes the strategy, without parentheses")
    STRATEGIES[name] = programs


def programs_of(name: str, mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Return the strategy of this name for a mesh or a number of ranks.

    Args:
        name: also a combination from `join_strategy_names`.

    Raises:
        As `make_strategy` does.
    """
    if SEPARATOR in name:
        return _programs(name, mesh, world_size)
    factory = STRATEGIES[name]
    if name not in STRATEGIES.references:
        return make_strategy(factory, mesh, world_size)
    return factory(mesh=mesh, world_size=world_size)


__all__ = [
    "DECODERS",
    "DEFAULT_STRATEGY",
    "RESHARDING_WORLD_SIZES",
    "STRATEGIES",
    "WORLD_SIZES",
    "Decoder",
    "aimed_programs",
    "all_meshes",
    "async_tp_programs",
    "attention_programs",
    "bucketing_programs",
    "compiled_programs",
    "cross_entropy_programs",
    "data_parallel_programs",
    "decode",
    "dtensor_programs",
    "effects_programs",
    "fsdp_programs",
    "functional_programs",
    "gradients_programs",
    "gram_programs",
    "join_strategy_names",
    "mixed_programs",
    "moe_programs",
    "near_miss_programs",
    "overlap_programs",
    "peephole_programs",
    "pipelining_programs",
    "programs_of",
    "register_strategy",
    "resharding_programs",
    "sequence_functional_programs",
    "tensor_parallel_programs",
    "traced_programs",
    "training_programs",
    "transformer_programs",
    "wild_programs",
]
