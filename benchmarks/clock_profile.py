"""Measures what a device profile holds, for `gpu_clocks.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from clock_device import Clock, Lanes
from clock_tables import markdown, median, micro, number

from tcverify.cost import PROFILES, DeviceProfile, parse_profile

#: Peaks of the vendor: what a device's name contains, the name of its profile, the known profile with the same chip, its memory's
#: bytes/s, and where that is from. Longer names first.
VENDOR = (
    ("H200", "h200", "h100-sxm", 4.8e12, "NVIDIA H200 data sheet; its chip is that of the H100 SXM"),
    ("H100", "h100", "h100-sxm", 3.35e12, "NVIDIA H100 data sheet"),
    ("A100", "a100", "a100-sxm-80gb", 2.039e12, "NVIDIA A100 data sheet"),
)

#: The profile whose interconnects and cost of a collective's launch are taken: one device shows nothing of them.
NETWORK = "h100-sxm"
F8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16, F8, torch.int8)


@dataclass
class Measured:
    """What was measured of a device.

    Attributes:
        matmul: FLOP/s of large products by dtype.
        memory: bytes/s that a large elementwise kernel reads and writes.
        matmul_launch, vector_launch: seconds that the smallest kernels take, back to back in a graph.
        eager: seconds that the host needs to issue such a kernel without a graph, by name of the op.
        hop: seconds that a dependency between two streams costs beyond one within a stream.
        problems: what could not be measured, and why.
    """

    matmul: dict[torch.dtype, float] = field(default_factory=dict)
    memory: float = 0.0
    matmul_launch: float = 0.0
    vector_launch: float = 0.0
    eager: dict[str, float] = field(default_factory=dict)
    hop: float = 0.0
    problems: list[str] = field(default_factory=list)


def measure(clock: Clock, tiny: bool, deadline: float) -> Measured:
    """Measure a device. What does not work there is left out and named in `problems`.

    Args:
        tiny: sizes of a rehearsal.
        deadline: of the monotonic clock; what comes later is left out.
    """
    found = Measured()

    def attempt(what: str, run: Callable[[], None]) -> None:
        if time.monotonic() > deadline:
            found.problems.append(f"{what}: no time was left")
            return
        try:
            run()
        except (RuntimeError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            found.problems.append(f"{what}: {str(error).strip().splitlines()[0][:200]}")

    def launches() -> None:
        count = 20 if tiny else 200
        x, a = torch.ones(8, device=clock.place), torch.ones(16, 16, device=clock.place)
        kernels = {"add": lambda: torch.add(x, 1.0), "mm": lambda: torch.mm(a, a)}
        for name, kernel in kernels.items():
            found.eager[name] = _issued(clock, kernel, count)
        found.vector_launch, found.matmul_launch = (_repeated(clock, kernel, count, 20) for kernel in kernels.values())

    def hops() -> None:
        count = 20 if tiny else 200
        x = torch.ones(8, device=clock.place)

        def alternating(lanes: Lanes) -> Any:
            made = [x]
            for step in range(count):
                stream = step % 2
                if step:
                    lanes.wait(stream, step - 1)
                with lanes.on(stream):
                    made.append(torch.add(made[-1], 1.0))
                lanes.mark(stream, step)
            return made

        (times,) = clock.seconds([clock.capture(alternating)], 20)
        found.hop = max(0.0, median(times) / count - found.vector_launch)

    def products(dtype: torch.dtype) -> None:
        found.matmul[dtype] = product_rate(clock, dtype, tiny)

    attempt("launch costs", launches)
    attempt("cost of a dependency between streams", hops)
    attempt("memory bandwidth", lambda: setattr(found, "memory", memory_rate(clock, tiny)))
    for dtype in DTYPES:
        attempt(f"products of {_plain(dtype)}", partial(products, dtype))
    return found


def _issued(clock: Clock, kernel: Callable[[], Any], count: int) -> float:
    for _ in range(count):
        kernel()
    clock.finish()
    begun = time.perf_counter()
    for _ in range(count):
        kernel()
    seconds = time.perf_counter() - begun
    clock.finish()
    return seconds / count


def _repeated(clock: Clock, kernel: Callable[[], Any], count: int, rounds: int) -> float:
    replay = clock.capture(lambda lanes: [kernel() for _ in range(count)])
    (times,) = clock.seconds([replay], rounds)
    return median(times) / count


def memory_rate(clock: Clock, tiny: bool) -> float:
    """Bytes/s that an elementwise kernel reads and writes. A copy may take another way: that of copies between devices."""
    size = 1 << (20 if tiny else 30)
    blocks = [random_values((size // 2,), torch.bfloat16, clock.place) for _ in range(4)]

    def scaled(lanes: Lanes) -> None:
        for source, target in ((0, 1), (2, 3), (1, 2), (3, 0)):
            torch.mul(blocks[source], 0.5, out=blocks[target])

    replay = clock.capture(scaled)
    clock.seconds([replay], 3)
    (times,) = clock.seconds([replay], 9)
    return 4 * 2 * size / median(times)


def product_rate(clock: Clock, dtype: torch.dtype, tiny: bool) -> float:
    """FLOP/s of large products of random factors."""
    n = 64 if tiny else 8192
    factors = [[random_values((n, n), dtype, clock.place) for _ in range(2)] for _ in range(3)]
    one = torch.ones((), device=clock.place)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if dtype == torch.int8:
            return torch._int_mm(a, b.t())
        if dtype == F8:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
        return a @ b.t()

    check = product(*factors[0])
    exact = factors[0][0][:4].double() @ factors[0][1].t().double()
    far = (check[:4].double() - exact).norm() / exact.norm()
    if not far < 0.05:
        raise ValueError(f"the product is wrong: its relative error is {far:.2g}")
    replay = clock.capture(lambda lanes: [product(*pair) for pair in factors])
    clock.seconds([replay], 2 if dtype == torch.float32 else 10)
    (times,) = clock.seconds([replay], 5 if dtype == torch.float32 else 15)
    return 3 * 2.0 * n**3 / median(times)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device, high: int = 100) -> torch.Tensor:
    """A tensor of random values: of (−1, 1), of integers from 0 up to `high`, of booleans."""
    if dtype == torch.bool:
        return torch.rand(shape, device=place) < 0.75
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=place)
    if not dtype.is_floating_point:
        least = -high if dtype == torch.int8 else 0
        return torch.randint(least, max(1, high), shape, dtype=torch.int32, device=place).to(dtype)
    return (2 * torch.rand(shape, device=place) - 1).to(dtype)


# ------------------------------------------------------------------------------------------------------- the profile


def profile_text(clock: Clock, found: Measured) -> str:
    """The profile in TOML: peaks of the vendor where the device is known, and efficiencies from measurement.

    Of a device that is not known, the measured rates are its peaks.
    """
    device = clock.name
    vendor = next((row for row in VENDOR if row[0] in device), None)
    known = PROFILES[vendor[2] if vendor else NETWORK]
    shares = {
        dtype: rate / known.matmul_flops[dtype] for dtype, rate in found.matmul.items() if dtype in known.matmul_flops
    }
    moved = found.memory or known.memory_rate  # where it could not be measured, which `problems` say
    measured_with = f"on one {device} with torch {torch.__version__}"
    if vendor:
        name, peaks, bandwidth = vendor[1], known.matmul_flops, vendor[3]
        compute, memory = (
            min(1.0, median(list(shares.values()) or [known.compute_efficiency])),
            min(1.0, moved / bandwidth),
        )
        rates = f"peaks of rates and memory bandwidth: {vendor[4]}"
    else:
        name, peaks, bandwidth = "measured", found.matmul or known.matmul_flops, moved
        compute = memory = 1.0
        rates = "rates and memory bandwidth: as measured, since no peaks of this device are known here"
    each = ", ".join(f"{_plain(dtype)} {rate / 1e12:.4g} TFLOP/s" for dtype, rate in found.matmul.items())
    sources = [
        rates,
        f"compute_efficiency: the median over dtypes, and memory_efficiency, measured {measured_with}: products of 8192 × 8192 "
        f"random factors ({each}), an elementwise kernel over 1 GiB ({found.memory / 1e12:.4g} TB/s read and written)",
        f"memory_bytes, launch.matmul and launch.vector: measured {measured_with}, the smallest kernels back to back in a CUDA "
        "graph",
        "vector_flops: the vendor's; elementwise kernels do not show them, since memory bounds them"
        if vendor
        else f"vector_flops: those of {known.name}, not of this device",
        f"interconnects and launch.comm: those of {PROFILES[NETWORK].name}, since one device alone shows nothing of them",
    ]
    vector = known.vector_flops
    lines = [
        f"name = {json.dumps(name)}",
        f"memory_bandwidth = {_float(bandwidth)}",
        f"memory_bytes = {_memory_bytes(clock, known)}",
        f"compute_efficiency = {_float(compute)}",
        f"memory_efficiency = {_float(memory)}",
        "sources = [",
        *(f"    {json.dumps(source, ensure_ascii=False)}," for source in sources),
        "]",
        "",
        "[matmul_flops]",
        *_rates(peaks),
        "",
        "[vector_flops]",
        *_rates(vector),
        "",
        "[launch]",
        f"matmul = {_float(found.matmul_launch)}",
        f"vector = {_float(found.vector_launch)}",
        f"comm = {_float(PROFILES[NETWORK].launch.comm)}",
    ]
    for dim in PROFILES[NETWORK].interconnects:
        lines += [
            "",
            "[[interconnects]]",
            f"name = {json.dumps(dim.name)}",
            f"size = {dim.size}",
            f"topology = {json.dumps(dim.topology)}",
            f"bandwidth = {_float(dim.bandwidth)}",
            f"latency_s = {_float(dim.latency_s)}",
            f"efficiency = {_float(dim.efficiency)}",
        ]
    return "\n".join([*lines, ""])


def _rates(rates: Mapping[torch.dtype, float]) -> list[str]:
    return [f"{_plain(dtype)} = {_float(rate)}" for dtype, rate in rates.items()]


def _float(value: float) -> str:
    """A float as TOML writes it."""
    return f"{value:.4e}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory_bytes(clock: Clock, known: DeviceProfile) -> int:
    if clock.place.type == "cuda":
        return int(torch.cuda.get_device_properties(clock.place).total_memory)
    return known.memory_bytes


def profile_section(clock: Clock, found: Measured) -> tuple[str, DeviceProfile, str]:
    """The Markdown of the section, the profile, and its TOML."""
    text = profile_text(clock, found)
    profile = parse_profile(text, "the measured profile")
    peaks = next((PROFILES[row[2]] for row in VENDOR if row[0] in clock.name), None)
    bandwidth = profile.memory_bandwidth if peaks else None
    rows = []
    for dtype, rate in found.matmul.items():
        peak = peaks.matmul_flops.get(dtype) if peaks else None
        rows.append((f"products of {_plain(dtype)}", f"{rate / 1e12:.4g} TFLOP/s", _share(rate, peak)))
    rows += [
        ("memory, read and written", f"{found.memory / 1e12:.4g} TB/s", _share(found.memory, bandwidth)),
        ("smallest elementwise kernel in a graph", f"{micro(found.vector_launch)} µs", ""),
        ("smallest product in a graph", f"{micro(found.matmul_launch)} µs", ""),
        ("dependency between streams in a graph, beyond one within a stream", f"{micro(found.hop)} µs", ""),
        *((f"the host issues {name} without a graph", f"{micro(seconds)} µs", "") for name, seconds in found.eager.items()),
    ]  # fmt: skip
    missing = "".join(f"\nNot measured: {problem}\n" for problem in found.problems)
    table = markdown(("figure", "measured", "share of the vendor's peak"), rows)
    return f"{table}{missing}\n```toml\n{text}```\n", profile, text


def _share(rate: float, peak: float | None) -> str:
    return "" if peak is None else number(rate / peak)
