"""Device profiles: which interconnect ranks span, rates per dtype, and TOML files with their errors."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tcverify.cost import PROFILES, DeviceProfile, Interconnect, LaunchCosts, load_device_profile, parse_profile
from tcverify.errors import UsageError

NODE = Interconnect("nvlink", 4, "clos", 100e9, 1e-6)
NETWORK = Interconnect("network", 8, "clos", 10e9, 5e-6)
MESH = Interconnect("mesh", 4, "full_mesh", 90e9, 1e-6)
BOX = DeviceProfile(
    name="box",
    interconnects=(NETWORK, NODE),
    matmul_flops={torch.bfloat16: 100e12, torch.float32: 10e12},
    vector_flops={torch.float32: 1e12},
    memory_bandwidth=1e12,
    memory_bytes=16 << 30,
    compute_efficiency=0.5,
    memory_efficiency=0.8,
)

TOML = """
sources = ["measured on Monday"]
memory_bandwidth = 1e12
memory_bytes = 16e9
compute_efficiency = 0.5
[matmul_flops]
bfloat16 = 1e14
float8_e4m3fn = 2e14
[vector_flops]
float32 = 1e12
[launch]
comm = 1e-5
[[interconnects]]
name = "network"
size = 8
topology = "clos"
bandwidth = 1e10
latency_s = 5e-6
efficiency = 0.9
[[interconnects]]
name = "mesh"
size = 4
topology = "full_mesh"
bandwidth = 9e10
latency_s = 1e-6
"""


# ------------------------------------------------------------------------------------------------------------ the grid


def test_ranks_sit_at_row_major_coordinates() -> None:
    assert [BOX.coordinates(rank) for rank in (0, 3, 4, 13)] == [(0, 0), (0, 3), (1, 0), (3, 1)]


def test_ranks_beyond_the_grid_stand_further_along_its_outermost_dim() -> None:
    assert BOX.coordinates(1001) == (250, 1)
    assert BOX.between([1000, 1003]) is NODE


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([0, 1, 2, 3], "nvlink"), ([3, 0], "nvlink"), ([0, 4], "network"), ([0, 1, 4, 5], "network"), ([3, 4], "network")],
)
def test_the_slowest_interconnect_that_ranks_span_limits_them(ranks: list[int], name: str) -> None:
    found = BOX.between(ranks)
    assert found is not None
    assert found.name == name


def test_one_rank_spans_nothing() -> None:
    assert BOX.between([5]) is None


def test_of_equally_slow_interconnects_the_one_with_more_latency_counts() -> None:
    near, far = replace(NODE, latency_s=1e-6), replace(NETWORK, bandwidth=100e9, latency_s=3e-6)
    assert replace(BOX, interconnects=(near, far)).between([0, 9]) == far
    assert replace(BOX, interconnects=(far, near)).between([0, 5]) == far


def test_efficiency_counts_in_what_is_slowest() -> None:
    lossy = replace(NODE, efficiency=0.05)
    assert replace(BOX, interconnects=(NETWORK, lossy)).between([0, 5]) == lossy


def test_links_of_a_full_mesh_share_its_bandwidth() -> None:
    assert MESH.link_bandwidth == 30e9
    assert NODE.link_bandwidth == 100e9


def test_a_mesh_spanned_together_with_another_dim_has_no_links_of_its_own() -> None:
    slow_mesh = replace(MESH, bandwidth=9e9)
    box = replace(BOX, interconnects=(NETWORK, slow_mesh))
    assert box.between([0, 1]) is slow_mesh
    both = box.between([0, 5])
    assert both == replace(slow_mesh, topology="clos")


def test_rates_are_those_of_the_dtype_and_else_the_slowest() -> None:
    assert BOX.matmul_rate(torch.bfloat16) == 50e12
    assert BOX.matmul_rate(torch.float64) == 5e12
    assert BOX.vector_rate(torch.int64) == 0.5e12
    assert BOX.memory_rate == 0.8e12


# ------------------------------------------------------------------------------------------------------- known devices


@pytest.mark.parametrize("name", list(PROFILES))
def test_known_devices_say_where_their_figures_come_from(name: str) -> None:
    profile = load_device_profile(name)
    assert profile.name == name
    assert len(profile.sources) >= 2
    assert profile.memory_rate < profile.matmul_rate(torch.bfloat16)
    assert profile.vector_rate(torch.float32) <= profile.matmul_rate(torch.bfloat16)
    inner = profile.interconnects[-1]
    assert all(inner.effective_bandwidth > outer.effective_bandwidth for outer in profile.interconnects[:-1])


def test_names_are_found_whatever_their_case_and_by_the_name_that_tensorcast_gives() -> None:
    assert load_device_profile("H100-SXM") is load_device_profile("h100-sxm")
    assert load_device_profile("ATLAS_800_A2_376T_64G") is load_device_profile("ascend-910b")


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        load_device_profile("h100")
    assert "no device profile 'h100'" in error.value.message
    assert "did you mean h100-sxm?" in str(error.value.hint)
    with pytest.raises(UsageError) as error:
        load_device_profile("zzz")
    assert str(error.value.hint).startswith("Known devices: h100-sxm, h200, a100-sxm-80gb")


# ---------------------------------------------------------------------------------------------------------- TOML files


def test_a_profile_is_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    profile = load_device_profile(str(path))
    assert profile.name == "mine"
    assert profile.interconnects == (replace(NETWORK, efficiency=0.9), MESH)
    assert dict(profile.matmul_flops) == {torch.bfloat16: 1e14, torch.float8_e4m3fn: 2e14}
    assert profile.memory_bytes == 16 * 10**9
    assert profile.launch == LaunchCosts(comm=1e-5)
    assert (profile.compute_efficiency, profile.memory_efficiency) == (0.5, 1.0)
    assert profile.sources == ("measured on Monday",)
    assert load_device_profile(str(path)) is profile


def test_a_profile_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    before = load_device_profile(str(path))
    path.write_text('name = "other"\n' + TOML)
    os.utime(path, ns=(1, 1))
    assert before.name == "mine"
    assert load_device_profile(str(path)).name == "other"


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ('topology = "clos"', 'topology = "ring"', "interconnect 'network': topology is 'ring'", "clos, full_mesh"),
        ("size = 8", "size = 1", "interconnect 'network': size is 1, not an integer of at least 2", ""),
        ("size = 8", "size = 2.5", "interconnect 'network': size is 2.5", ""),
        ("bandwidth = 1e10", "bandwidth = 0", "interconnect 'network': bandwidth is 0, not a positive number of", ""),
        ("bandwidth = 1e10", 'bandwidth = "fast"', "interconnect 'network': bandwidth is 'fast'", ""),
        ("latency_s = 5e-6", "latency_s = -1", "interconnect 'network': latency_s is -1, not a number of seconds", ""),
        ("latency_s = 5e-6", "latency = 5e-6", "interconnects[0] has no field 'latency'", "did you mean latency_s?"),
        ("latency_s = 5e-6\n", "", "interconnects[0]: latency_s is missing", ""),
        ("efficiency = 0.9", "efficiency = 1.2", "interconnect 'network': efficiency is 1.2, not a share", ""),
        ("compute_efficiency = 0.5", "compute_efficiency = 0", "compute_efficiency is 0, not a share", ""),
        ("memory_bandwidth = 1e12", "memory_bandwidth = inf", "memory_bandwidth is inf", ""),
        ("memory_bandwidth = 1e12\n", "", "the profile: memory_bandwidth is missing", ""),
        ("memory_bytes = 16e9", "memory_bytes = 0.5", "memory_bytes is 0.5, not a positive integer", ""),
        ("bfloat16 = 1e14", "brainfloat = 1e14", "matmul_flops.brainfloat: torch has no dtype", "e.g. float32"),
        ("bfloat16 = 1e14", "bfloat16 = true", "matmul_flops.bfloat16 is True, not a positive number of FLOP/s", ""),
        ("comm = 1e-5", "comm = -1e-5", "launch.comm is -1e-05, not a number of seconds", ""),
        ("comm = 1e-5", "gemm = 1e-5", "launch has no field 'gemm'", "fields: matmul, vector, comm"),
        ("[vector_flops]\nfloat32 = 1e12", "[vector_flops]", "vector_flops: no dtype has a rate", "bfloat16"),
        ('sources = ["measured on Monday"]', "sources = [1]", "sources is not a list of strings", ""),
        ('sources = ["measured on Monday"]', 'name = ""', "name is '', not a name", ""),
        ('sources = ["measured on Monday"]', "color = 1", "the profile has no field 'color'", "fields: name, "),
        ("[launch]", "[launch", "is not TOML", ""),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_file_and_field(old: str, new: str, message: str, hint: str) -> None:
    assert old in TOML
    with pytest.raises(UsageError) as error:
        parse_profile(TOML.replace(old, new, 1), "here.toml")
    assert error.value.message.startswith("device profile here.toml")
    assert message in error.value.message
    assert hint in str(error.value.hint)


def test_a_profile_without_interconnects_is_refused() -> None:
    text = TOML[: TOML.index("[[interconnects]]")]
    with pytest.raises(UsageError, match="interconnects is missing"):
        parse_profile(text, "here.toml")
    with pytest.raises(UsageError, match="a device needs one at least"):
        parse_profile("interconnects = []\n" + text, "here.toml")
    with pytest.raises(UsageError, match="interconnects is not a list of tables"):
        parse_profile("interconnects = 3\n" + text, "here.toml")
    with pytest.raises(UsageError, match=r"interconnects\[0\] is not a table"):
        parse_profile("interconnects = [3]\n" + text, "here.toml")


def test_a_missing_or_unreadable_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        load_device_profile(str(tmp_path / "nowhere.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"device profile .*binary\.toml"):
        load_device_profile(str(binary))
