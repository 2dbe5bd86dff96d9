"""What is verified: programs, their mesh, placements, inputs and files; and the data that verdicts are made of."""

from tcverify.program.build import GraphBuilder, spmd_program
from tcverify.program.codec import dumps, loads, program_id
from tcverify.program.contract import Contract
from tcverify.program.finding import KINDS, Doubt, Finding, Note, Said
from tcverify.program.graph import RankBinding, RankConstant, compute_nodes
from tcverify.program.inputs import InputSpec, Recipe
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.options import Options
from tcverify.program.placed import Placed, PlacedBuilder
from tcverify.program.placed_plan import PlacedInput, PlacedPlan, PlacedStep, Use
from tcverify.program.placement import PARTIAL, REPLICATED, VARYING, Placement, shard
from tcverify.program.program import Program
from tcverify.program.statistics import CollectiveStatistics, decode_statistics
from tcverify.program.streams import StreamSettings
from tcverify.program.values import NotSerialisable

__all__ = [
    "KINDS",
    "PARTIAL",
    "REPLICATED",
    "VARYING",
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
    "Said",
    "StreamSettings",
    "Use",
    "compute_nodes",
    "decode_statistics",
    "dumps",
    "loads",
    "program_id",
    "shard",
    "spmd_program",
]
