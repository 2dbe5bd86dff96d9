"""What a program costs: device profiles, an analytic model of time, liveness and peak memory."""

from tcverify.cost.collectives import algorithm_times, collective_time
from tcverify.cost.device import DeviceProfile, Interconnect, LaunchCosts
from tcverify.cost.memory import Lifetime, MemoryProfile, lifetimes, memory_profile, storage_of
from tcverify.cost.model import MIN_COST_S, graph_costs, node_cost, takes_no_time
from tcverify.cost.profiles import PROFILES, device, parse_profile

__all__ = [
    "MIN_COST_S",
    "PROFILES",
    "DeviceProfile",
    "Interconnect",
    "LaunchCosts",
    "Lifetime",
    "MemoryProfile",
    "algorithm_times",
    "collective_time",
    "device",
    "graph_costs",
    "lifetimes",
    "memory_profile",
    "node_cost",
    "parse_profile",
    "storage_of",
    "takes_no_time",
]
