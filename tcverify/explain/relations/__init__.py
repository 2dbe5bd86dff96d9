"""How the values of a rewritten program relate to those of the original: equal, a shard of it, an addend of it, unrelated.

By values alone: nothing here knows a pass, or what an op computes.
"""

from tcverify.explain.relations.relating import relate, relation_between
from tcverify.explain.relations.relation import EXPLAINED, Relation
from tcverify.explain.relations.tensors import TOLERANCE, Measure

__all__ = ["EXPLAINED", "TOLERANCE", "Measure", "Relation", "relate", "relation_between"]
