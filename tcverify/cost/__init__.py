"""What a program costs: device profiles, an analytic model of time."""

from tcverify.cost.collectives import algorithm_times, collective_time
from tcverify.cost.device import DeviceProfile, Interconnect, LaunchCosts
from tcverify.cost.model import MIN_COST_S, node_cost, takes_no_time
from tcverify.cost.profiles import PROFILES, load_device_profile, parse_profile

__all__ = [
    "MIN_COST_S",
    "PROFILES",
    "DeviceProfile",
    "Interconnect",
    "LaunchCosts",
    "algorithm_times",
    "collective_time",
    "load_device_profile",
    "node_cost",
    "parse_profile",
    "takes_no_time",
]
