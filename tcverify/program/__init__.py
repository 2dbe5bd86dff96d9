"""What is verified: programs, their mesh, placements, inputs and files; and the data of verdicts."""

from tcverify.program.blame import Blame, Rewrite, decode_blame, encode_blame
from tcverify.program.builder import GraphBuilder, spmd_program
from tcverify.program.codec import dumps, loads, program_id
from tcverify.program.contract import Contract
from tcverify.program.finding import KINDS, Doubt, Finding, Note, Said
from tcverify.program.global_view.builder import Placed, PlacedBuilder
from tcverify.program.global_view.plan import PlacedInput, PlacedPlan, PlacedStep, Use
from tcverify.program.graph import RankBinding, RankConstant, compute_nodes
from tcverify.program.inputs import InputSpec, Recipe
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.pass_options import Options
from tcverify.program.placement import PARTIAL, REPLICATED, UNKNOWN, VARYING, Placement, shard
from tcverify.program.program import Program
from tcverify.program.rewriting import Allowed, RewriteRequest, count_rewrites, decode_rewrite_requests, rewrite
from tcverify.program.statistics import CollectiveStatistics, decode_statistics
from tcverify.program.stream_options import StreamSettings
from tcverify.program.values import NotSerialisable

__all__ = [
    "KINDS",
    "PARTIAL",
    "REPLICATED",
    "UNKNOWN",
    "VARYING",
    "Allowed",
    "Blame",
    "CollectiveStatistics",
    "Contract",
    "Doubt",
    "Finding",
    "GraphBuilder",
    "InputSpec",
    "Mesh",
    "MeshDim",
    "NotSerialisable",
    "Note",
    "Options",
    "Placed",
    "PlacedBuilder",
    "PlacedInput",
    "PlacedPlan",
    "PlacedStep",
    "Placement",
    "Program",
    "RankBinding",
    "RankConstant",
    "Recipe",
    "Rewrite",
    "RewriteRequest",
    "Said",
    "StreamSettings",
    "Use",
    "compute_nodes",
    "count_rewrites",
    "decode_blame",
    "decode_rewrite_requests",
    "decode_statistics",
    "dumps",
    "encode_blame",
    "loads",
    "program_id",
    "rewrite",
    "shard",
    "spmd_program",
]
