"""Global state that a pass may change besides its graph: torch's settings, random seeds, and torch itself.

A compiler runs passes in the process that trains or serves. A pass that changes the default dtype, for instance,
affects unrelated programs; here it would affect how the next one is judged. So all of this state is restored after a
pass, and changes are reported.

Changes by other threads are attributed to the pass. Changes made by importing a module are ignored.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@dataclass(frozen=True, slots=True)
class GlobalSetting:
    """One piece of global state.

    Attributes:
        read: returns it, to be compared with `same`.
        write: restores it; None if that is impossible.
        shown: whether its values are worth showing.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    same: Callable[[Any, Any], bool] = lambda a, b: bool(a == b)
    shown: bool = True


def _group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _default_device() -> torch.device | None:
    """The device that was set; None if none was, which differs from setting the CPU: that is a mode."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _function_modes(wanted: list[Any]) -> None:
    while len(_get_current_function_mode_stack()) > len(wanted):
        torch._C._pop_torch_function_stack()


def _dispatch_modes(wanted: list[Any]) -> None:
    while (modes := _get_current_dispatch_mode_stack()) and len(modes) > len(wanted):
        modes[-1].__exit__(None, None, None)


def _identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


#: Number of times that a random number generator may exhaust its 624 words while a pass draws from it.
_ROUNDS = 100


def _drawn_on(before: Any, now: Any) -> bool:
    """Whether drawing numbers has led from one state of Python's generator to the other. A new seed does not.

    Drawing is legitimate (modules do so when constructed) and is not undone: otherwise a randomised pass would seem repeatable.
    """
    words = now[1][:-1]
    if before[1][:-1] == words:
        return True
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_ROUNDS):
        generator.getrandbits(32 * 624)
        if generator.getstate()[1][:-1] == words:
            return True
    return False


#: Torch's global state, by name, in the order of restoration: under a mode, other reads give different results.
SETTINGS: Mapping[str, GlobalSetting] = MappingProxyType(
    {
        "modes of dispatch": GlobalSetting(_get_current_dispatch_mode_stack, _dispatch_modes, _identical, shown=False),
        "the default device": GlobalSetting(_default_device, torch.set_default_device),
        "modes of functions": GlobalSetting(_get_current_function_mode_stack, _function_modes, _identical, shown=False),
        "inference mode": GlobalSetting(torch.is_inference_mode_enabled, None),
        "grad mode": GlobalSetting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "the default dtype": GlobalSetting(torch.get_default_dtype, torch.set_default_dtype),
        "autocast on the CPU": GlobalSetting(
            lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)
        ),
        "the number of threads": GlobalSetting(torch.get_num_threads, torch.set_num_threads),
        "the mode of deterministic algorithms": GlobalSetting(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "anomaly detection": GlobalSetting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "the seed of torch's random numbers": GlobalSetting(
            lambda: (torch.initial_seed(), torch.get_rng_state()),
            lambda known: torch.set_rng_state(known[1]),
            lambda a, b: bool(a[0] == b[0]),
            shown=False,
        ),
        "the seed of Python's random numbers": GlobalSetting(random.getstate, random.setstate, _drawn_on, shown=False),
        "the process group": GlobalSetting(_group, None, lambda a, b: a is b, shown=False),
    }
)

#: Where passes find torch's functions and classes. New names may appear, as torch imports its parts on first use.
_SPACES: Mapping[str, Any] = MappingProxyType(
    {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
        "torch.nn.functional": torch.nn.functional,
        "torch.distributed": dist,
        "torch.fx": fx,
        "torch.fx.Graph": fx.Graph,
        "torch.fx.GraphModule": fx.GraphModule,
        "torch.fx.Node": fx.Node,
    }
)


#: What torch itself changes along with a setting.
_FOLLOWING = ("torch.Storage",)  # the default dtype

#: Whose functions torch itself puts in place, for good: TorchDynamo wraps what makes modules when it first runs.
_OWN = "torch._dynamo.mutation_guard"

#: Attributes of a class that represent functions without being callable.
_WRAPPED = (property, classmethod, staticmethod)


@dataclass(slots=True)
class GlobalChanges:
    """What has changed while it was watched.

    Attributes:
        what: the changes, one phrase each.
        left: those that could not be restored.
    """

    what: list[str]
    left: list[str]

    def __str__(self) -> str:
        rest = f"; could not be restored: {', '.join(self.left)}" if self.left else ""
        return f"changed {', '.join(self.what)}{rest}"


@contextlib.contextmanager
def watch_global_state() -> Iterator[GlobalChanges]:
    """Watch torch's global state; at the end restore what has changed, and record it in the yielded object."""
    changed = GlobalChanges([], [])
    before = {name: setting.read() for name, setting in SETTINGS.items()}
    spaces = {name: dict(vars(owner)) for name, owner in _SPACES.items()}
    try:
        yield changed
    finally:
        _unpatch(spaces, changed)
        for name, setting in SETTINGS.items():
            now = setting.read()
            if setting.same(before[name], now):
                continue
            changed.what.append(f"{name} from {before[name]} to {now}" if setting.shown else name)
            try:
                if setting.write is not None:
                    setting.write(before[name])
                if setting.write is None or not setting.same(before[name], setting.read()):
                    changed.left.append(name)
            except Exception:  # noqa: BLE001 - what a pass has left of torch may be broken in any way
                changed.left.append(name)


def _unpatch(spaces: dict[str, dict[str, Any]], changed: GlobalChanges) -> None:
    """Restore torch's own functions and classes if they were replaced. `spaces` holds all names as they were."""
    for space, known in spaces.items():
        owner = _SPACES[space]
        now = vars(owner)
        if all(map(is_, known.values(), now.values())) and len(now) >= len(known):  # new names come after the old ones
            continue
        for name, value in known.items():
            if (
                now.get(name) is not value
                and f"{space}.{name}" not in _FOLLOWING
                and getattr(now.get(name), "__module__", None) != _OWN
                and (callable(value) or type(value) in _WRAPPED)
            ):
                changed.what.append(f"{space}.{name}")
                setattr(owner, name, value)


__all__ = ["SETTINGS", "GlobalChanges", "GlobalSetting", "watch_global_state"]
