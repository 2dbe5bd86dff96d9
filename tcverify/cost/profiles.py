"""Devices that are known by name, and profiles from TOML files.

Rates of the known devices are peaks that their vendors publish, for dense operands; NVIDIA's data sheets print rates with
sparsity, which are halved here. `sources` says what was measured. All else, and efficiencies above all, is an estimate: for more
than the order of magnitude, measure (benchmarks/gpu_clocks.py) and write a TOML file.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tcverify.cost.device import DeviceProfile, Interconnect, LaunchCosts
from tcverify.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_F32, _F16, _BF16, _I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
_GIB = 1 << 30

# Latencies of NVIDIA's interconnects, and what a collective costs at least: the tables hwLat and baseLat in src/graph/tuning.cc
# of NCCL 2.20 (protocol LL, ring). RCCL has a table of its own for AMD's (src/graph/tuning.cc of RCCL for ROCm 6).
_NCCL = "latencies: hwLat and baseLat (LL, ring) in NCCL 2.20, src/graph/tuning.cc"
_RCCL = "latencies: hwLat and baseLat (LL, ring) in RCCL for ROCm 6, src/graph/tuning.cc"
_ASSUMED = "efficiencies and launch costs of compute: assumptions, not measured"
_NCCL_LAUNCH = LaunchCosts(matmul=3 * _MICRO, vector=2 * _MICRO, comm=6.6 * _MICRO)

_H100 = DeviceProfile(
    name="h100-sxm",
    interconnects=(
        Interconnect("infiniband", 128, "clos", 50 * _GIGA, 2.7 * _MICRO, 0.9),
        Interconnect("nvlink", 8, "clos", 450 * _GIGA, 0.6 * _MICRO, 0.8),
    ),
    matmul_flops={_F32: 66.9 * _TERA, _F16: 989.4 * _TERA, _BF16: 989.4 * _TERA, _I8: 1978.9 * _TERA}
    | dict.fromkeys(_FP8, 1978.9 * _TERA),
    vector_flops={_F32: 66.9 * _TERA, _F16: 133.8 * _TERA, _BF16: 133.8 * _TERA},
    memory_bandwidth=3.35 * _TERA,
    memory_bytes=80 * 10**9,
    compute_efficiency=0.7,
    memory_efficiency=0.85,
    launch=_NCCL_LAUNCH,
    sources=(
        "rates, memory, NVLink 4 (900 GB/s in both directions together): NVIDIA H100 data sheet, Hopper white paper",
        "network: one 400 Gb/s NDR InfiniBand port per GPU, as in DGX H100",
        _NCCL,
        _ASSUMED,
    ),
)

_H200 = replace(
    _H100,
    name="h200",
    memory_bandwidth=4.8 * _TERA,
    memory_bytes=150_109_880_320,
    compute_efficiency=0.79,
    memory_efficiency=0.79,
    launch=LaunchCosts(matmul=4.2 * _MICRO, vector=1.5 * _MICRO, comm=6.6 * _MICRO),
    sources=(
        "peaks: NVIDIA H200 data sheet; its chip is that of the H100 SXM",
        "efficiencies and launch costs of compute: fitted to 1,496 ops of drawn programs and Llama layers in CUDA graphs, and to "
        "products of 8192 × 8192 (bfloat16 783 TFLOP/s, float32 51, float16 676, float8_e4m3fn 1418, int8 931), on one NVIDIA "
        "H200 with torch 2.11.0 on 2026-11-26: benchmarks/gpu_clocks.py",
        "interconnects and launch.comm: those of h100-sxm; one device alone does not show them",
    ),
)

_A100 = DeviceProfile(
    name="a100-sxm-80gb",
    interconnects=(
        Interconnect("infiniband", 128, "clos", 25 * _GIGA, 2.7 * _MICRO, 0.9),
        Interconnect("nvlink", 8, "clos", 300 * _GIGA, 0.6 * _MICRO, 0.8),
    ),
    matmul_flops={_F32: 19.5 * _TERA, _F16: 312 * _TERA, _BF16: 312 * _TERA, _I8: 624 * _TERA},
    vector_flops={_F32: 19.5 * _TERA, _F16: 78 * _TERA, _BF16: 39 * _TERA},
    memory_bandwidth=2.039 * _TERA,
    memory_bytes=80 * 10**9,
    compute_efficiency=0.75,
    memory_efficiency=0.85,
    launch=_NCCL_LAUNCH,
    sources=(
        "rates, memory, NVLink 3 (600 GB/s in both directions together): NVIDIA A100 data sheet, Ampere white paper",
        "network: one 200 Gb/s HDR InfiniBand port per GPU, as in DGX A100",
        _NCCL,
        _ASSUMED,
    ),
)

_MI300X = DeviceProfile(
    name="mi300x",
    interconnects=(
        Interconnect("ethernet", 128, "clos", 50 * _GIGA, 2.7 * _MICRO, 0.9),
        Interconnect("infinity-fabric", 8, "full_mesh", 448 * _GIGA, 0.8 * _MICRO, 0.75),
    ),
    matmul_flops={_F32: 163.4 * _TERA, _F16: 1307.4 * _TERA, _BF16: 1307.4 * _TERA, _I8: 2614.9 * _TERA}
    | dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), 2614.9 * _TERA),
    vector_flops={_F32: 163.4 * _TERA},
    memory_bandwidth=5.3 * _TERA,
    memory_bytes=192 * 10**9,
    compute_efficiency=0.5,
    memory_efficiency=0.8,
    launch=LaunchCosts(matmul=4 * _MICRO, vector=3 * _MICRO, comm=12 * _MICRO),
    sources=(
        "rates, memory, Infinity Fabric (7 links of 128 GB/s in both directions together): AMD Instinct MI300X data sheet",
        "network: one 400 Gb/s port per GPU and its latency: assumptions",
        _RCCL,
        _ASSUMED,
    ),
)

_ASCEND_910B = DeviceProfile(
    name="ascend-910b",
    interconnects=(
        Interconnect("roce", 128, "clos", 25 * _GIGA, 1.5 * _MICRO, 0.7),
        Interconnect("hccs", 8, "full_mesh", 196 * _GIGA, 0.5 * _MICRO, 0.7),
    ),
    matmul_flops={_F32: 99.5 * _TERA, _F16: 376 * _TERA, _BF16: 353.9 * _TERA, _I8: 752 * _TERA},
    vector_flops={_F32: 11 * _TERA, _F16: 22 * _TERA, _BF16: 22 * _TERA},
    memory_bandwidth=1.6 * 1024**4,
    memory_bytes=64 * _GIB,
    compute_efficiency=0.7,
    memory_efficiency=0.6,
    launch=LaunchCosts(matmul=5 * _MICRO, vector=2 * _MICRO, comm=10 * _MICRO),
    sources=(
        "all figures: TensorCast's profile ATLAS_800_A2_376T_64G (tensor_cast/device.py), whose authors mark efficiencies, "
        "latencies and launch costs as not yet calibrated",
        "eight devices are linked pairwise by HCCS, 28 GB/s in each direction",
    ),
)

_L4 = DeviceProfile(
    name="l4",
    interconnects=(
        Interconnect("ethernet", 16, "clos", 12.5 * _GIGA, 2.7 * _MICRO, 0.8),
        Interconnect("pcie", 8, "clos", 32 * _GIGA, 1.0 * _MICRO, 0.7),
    ),
    matmul_flops={_F32: 30.3 * _TERA, _F16: 121 * _TERA, _BF16: 121 * _TERA, _I8: 242.5 * _TERA}
    | dict.fromkeys(_FP8, 242.5 * _TERA),
    vector_flops={_F32: 30.3 * _TERA, _F16: 30.3 * _TERA, _BF16: 30.3 * _TERA},
    memory_bandwidth=0.3 * _TERA,
    memory_bytes=24 * 10**9,
    compute_efficiency=0.6,
    memory_efficiency=0.8,
    launch=_NCCL_LAUNCH,
    sources=(
        "rates, memory, PCIe 4.0 x16 (64 GB/s in both directions together): NVIDIA L4 data sheet",
        "eight cards to a server, one 100 Gb/s port each: assumptions",
        _NCCL,
        _ASSUMED,
    ),
)

#: The known devices by name.
PROFILES: Mapping[str, DeviceProfile] = {
    profile.name: profile for profile in (_H100, _H200, _A100, _MI300X, _ASCEND_910B, _L4)
}

#: Names that others give to known devices.
_ALSO_CALLED = {"ATLAS_800_A2_376T_64G": "ascend-910b"}


def load_device_profile(name_or_path: str) -> DeviceProfile:
    """Return a device profile by the name of a known device, or by the path of a TOML file (`*.toml`).

    Raises:
        UsageError: there is no such device or file, or the file describes no device.
    """
    if not isinstance(name_or_path, str):
        raise UsageError(f"{name_or_path!r} names no device profile", f"known devices: {', '.join(PROFILES)}")
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            changed = path.stat().st_mtime_ns
        except OSError as error:
            raise UsageError(
                f"device profile {name_or_path}: {error.strerror or error}", f"known devices: {', '.join(PROFILES)}"
            ) from None
        return _read(path.resolve(), changed)
    known = PROFILES.get(_ALSO_CALLED.get(name_or_path, name_or_path.lower()))
    if known is not None:
        return known
    longer = [name for name in PROFILES if name.startswith(name_or_path.lower())]
    near = longer or difflib.get_close_matches(name_or_path.lower(), PROFILES, cutoff=0.4)
    raise UsageError(
        f"there is no device profile '{name_or_path}'",
        (f"did you mean {' or '.join(near)}? " if near else "")
        + f"Known devices: {', '.join(PROFILES)}; or give the path of a .toml file",
    )


@lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> DeviceProfile:
    """Read a profile once: what is known of its ops' costs is kept with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"device profile {path}: {error}") from None
    return parse_profile(text, str(path), default_name=path.stem)


def parse_profile(text: str, where: str, default_name: str = "device") -> DeviceProfile:
    """Read a profile from TOML. Keys are the fields of `DeviceProfile`, with `[[interconnects]]`, `[launch]` and one table of
    dtypes each for `matmul_flops` and `vector_flops`.

    Args:
        where: names the file in errors.
        default_name: of the profile, where the file gives none.

    Raises:
        UsageError: naming the file and the field.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"device profile {where} is not TOML: {error}") from None
    try:
        return _profile({"name": default_name} | data)
    except UsageError as error:
        raise UsageError(f"device profile {where}: {error.message}", error.hint) from None


def _profile(data: dict[str, Any]) -> DeviceProfile:
    given = _record(data, DeviceProfile, "the profile")
    _string(given["name"], "name")
    tables = given["interconnects"]
    if not isinstance(tables, list):
        raise UsageError(
            "interconnects is not a list of tables", "write one [[interconnects]] per dim, outermost first"
        )
    given["interconnects"] = tuple(_interconnect(table, f"interconnects[{i}]") for i, table in enumerate(tables))
    for rates in ("matmul_flops", "vector_flops"):
        given[rates] = _rates(given[rates], rates)
    if "launch" in given:
        given["launch"] = LaunchCosts(**_record(given["launch"], LaunchCosts, "launch"))
    sources = given.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise UsageError("sources is not a list of strings")
    given["sources"] = tuple(sources)
    size = given["memory_bytes"]
    if isinstance(size, float) and size.is_integer():  # 80e9 is how sizes are written
        given["memory_bytes"] = int(size)
    return DeviceProfile(**given)


def _interconnect(table: Any, where: str) -> Interconnect:
    given = _record(table, Interconnect, where)
    _string(given["name"], f"{where}.name")
    return Interconnect(**given)


def _rates(table: Any, where: str) -> dict[torch.dtype, float]:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is not a table of dtypes", "write e.g. bfloat16 = 1e14 below it")
    rates = {}
    for name, rate in table.items():
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"{where}.{name}: torch has no dtype of this name", "e.g. float32, bfloat16, float8_e4m3fn"
            )
        rates[dtype] = rate
    return rates


def _record(table: Any, cls: type[Any], where: str) -> dict[str, Any]:
    """Return a table whose keys are fields of the dataclass `cls`, with none of those missing that need a value."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} is not a table")
    known = [field.name for field in fields(cls)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UsageError(
                f"{where} has no field '{key}'", f"did you mean {near[0]}?" if near else f"fields: {', '.join(known)}"
            )
    required = [name for name in known if name not in _OPTIONAL[cls]]
    for name in required:
        if name not in table:
            raise UsageError(f"{where}: {name} is missing")
    return dict(table)


_OPTIONAL: Mapping[type[Any], frozenset[str]] = {
    DeviceProfile: frozenset({"compute_efficiency", "memory_efficiency", "launch", "sources"}),
    Interconnect: frozenset({"efficiency"}),
    LaunchCosts: frozenset({"matmul", "vector", "comm"}),
}


def _string(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {value!r}, not a name")
