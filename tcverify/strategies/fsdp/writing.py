"""Writes FSDP programs: what is gathered, where it is copied to, when it is freed, and how gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tcverify.ops import RESIZE
from tcverify.program import GraphBuilder
from tcverify.strategies.fsdp.choices import FsdpSetting
from tcverify.strategies.fsdp.layers import (
    BF16,
    F32,
    LayerParams,
    Param,
    backward,
    compute_dtype,
    forward,
    gathered_dtype,
    inputs_of,
)
from tcverify.strategies.transformer.roles import Roles

_C10D = "_c10d_functional::"


@dataclass(slots=True)
class _Gathering:
    """An all_gather in flight, or complete: its result, the buffer of its copy-in, and the elements of each shard."""

    result: fx.Node
    buffer: fx.Node
    sizes: list[int]


@dataclass(slots=True)
class FsdpWriter:
    """Writes the graph of a class of ranks.

    Attributes:
        full: per layer, by the name of a parameter, the node of the full parameter.
        casts: by the name of a parameter, its shard as it is gathered.
        buffers: by their size, a buffer that the next layer uses again.
        extras: additional return values.
        whole: names of the parameters that hold memory.
        inputs: by name.
        stale: by the name of a parameter, a view of it that the forward created.
        tail: layers whose parameters are to be freed later.
    """

    b: GraphBuilder
    roles: Roles
    setting: FsdpSetting
    layers: list[LayerParams]
    full: dict[int, dict[str, fx.Node]] = field(default_factory=dict)
    casts: dict[str, fx.Node] = field(default_factory=dict)
    buffers: dict[int, fx.Node] = field(default_factory=dict)
    extras: list[fx.Node] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    stale: dict[str, fx.Node] = field(default_factory=dict)
    tail: list[LayerParams] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of parameters in full."""
        return compute_dtype(self.setting)

    @property
    def gathered(self) -> torch.dtype:
        """Of gathered values."""
        return gathered_dtype(self.setting)

    def size(self, dim: str) -> int:
        """Ranks of this rank's group."""
        return len(self.b.mesh.dim(dim).group(self.b.representative))

    def empty(self, size: int, dtype: torch.dtype) -> fx.Node:
        return self.b.call("aten::empty.memory_format", [size], dtype=dtype)

    def view(self, value: fx.Node, shape: list[int]) -> fx.Node:
        return self.b.call("aten::view", value, shape)

    # -------------------------------------------------------------------------------------------------------- the program

    def write(self) -> Any:
        """Write all of it, and return what the program returns."""
        names = [spec.name for spec in inputs_of(self.roles, self.setting, self.layers)]
        self.inputs = {name: self.b.input(name) for name in names}
        for layer in self.layers:
            self._before_all(layer)
        saved = []
        value = self.inputs["x"]
        for layer, weights in self._gathered(self.layers):
            if layer.record.twist == "stale-view" and self.setting.target == "input":
                self.stale[layer.params[0].name] = self.b.call("aten::t", weights[layer.params[0].name])
            saved.append((layer, value))
            value = forward(self.b, layer, self._viewed(layer, weights), value)
            if self.setting.reshard or not self.setting.backward:
                self._free(layer)
        self._flush()
        gradients: list[fx.Node] = []
        if self.setting.backward:
            gradient = self.b.call("aten::mul.Tensor", value, 0.5)
            order = list(reversed(self.layers))
            behind = dict((layer.number, before) for layer, before in saved)
            for layer, weights in self._gathered(order, again=True):
                gradient, found = backward(self.b, layer, self._viewed(layer, weights), behind[layer.number], gradient)
                self._free(layer)
                gradients += self._reduced(layer, found)
            gradients.append(gradient)
            self._flush()
        self._after_all()
        return (value, *gradients, *self.extras)

    def _gathered(
        self, order: list[LayerParams], again: bool = False
    ) -> Iterator[tuple[LayerParams, dict[str, fx.Node]]]:
        """Go through layers in an order, each with its full parameters; prefetched all_gathers are started in time."""
        if again and not self.setting.reshard:
            for layer in order:
                yield layer, self.full[layer.number]
            return
        prefetch = (
            "none" if any(layer.record.twist == "buffer-reused" for layer in self.layers) else self.setting.prefetch
        )
        started: dict[int, _Gathering] = {order[0].number: self._start(order[0])}
        for layer, following in zip(order, [*order[1:], None], strict=True):
            if following is not None and prefetch == "overlapping":
                started[following.number] = self._start(following)
            self._flush(layer)
            self.full[layer.number] = self._finish(layer, started[layer.number])
            if following is not None and prefetch == "early":
                started[following.number] = self._start(following)
            yield layer, self.full[layer.number]
            if following is not None and prefetch == "none":
                started[following.number] = self._start(following)

    # ---------------------------------------------------------------------------------------------------------- gathering

    def _start(self, layer: LayerParams) -> _Gathering:
        n = self.size(layer.dim)
        if layer.record.twist == "stepped" and layer.of.number in self.full:
            for param in layer.params:
                self.b.call("aten::mul_.Tensor", self.inputs[f"{param.name}_shard"], 0.5)
        shards = [self._shard(layer, param) for param in layer.params]
        sizes = [math.prod(param.padded_shape) // n for param in layer.params]
        total = sum(sizes)
        buffer = self.buffers.pop(total * n, None)
        if buffer is None and layer.record.twist in ("buffer-read", "buffer-returned"):
            buffer = self.b.call("aten::zeros", [total * n], dtype=self.gathered)
        elif buffer is None:
            buffer = self.empty(total * n, self.gathered)
        if layer.record.twist == "buffer-reused" and self.setting.gather == "functional":
            self.buffers[total * n] = buffer
        position = self.b.constant(f"position_{layer.dim}", self.b.mesh.dim(layer.dim).position)
        copied = self.b.call("fsdp::all_gather_copy_in", shards, buffer, sizes, total, position)
        mine = self.b.getitem(copied, 0)
        if self.setting.gather == "out":
            whole = self.b.getitem(copied, 1)
            result = self.b.call(f"{_C10D}all_gather_into_tensor_out", mine, n, layer.dim, out=whole)
        else:
            result = self.b.call(f"{_C10D}all_gather_into_tensor", mine, n, layer.dim)
        return _Gathering(result, buffer, sizes)

    def _shard(self, layer: LayerParams, param: Param) -> fx.Node:
        if layer.of is not layer and layer.record.share and param.name in self.casts:
            return self.casts[param.name]
        found = self.inputs[f"{param.name}_shard"]
        if param.dtype is not self.gathered:
            found = self.b.call("aten::_to_copy", found, dtype=self.gathered)
        self.casts[param.name] = found = self.view(found, [-1])
        return found

    def _finish(self, layer: LayerParams, gathering: _Gathering) -> dict[str, fx.Node]:
        n = self.size(layer.dim)
        waited = self.b.call(f"{_C10D}wait_tensor", gathering.result)
        rows = self.view(waited, [n, -1])
        if layer.record.twist in ("buffer-read", "buffer-returned"):
            total = self.b.call("aten::sum", gathering.buffer)
            self.extras.append(total)
            if layer.record.twist == "buffer-returned":
                self.extras.append(gathering.buffer)
        to_inputs = self.setting.target == "input"
        alike = self.gathered is self.dtype and not any(param.padded for param in layer.params)
        straight = self.setting.copy_out == "direct" and to_inputs and alike
        if straight:
            for param in layer.params:
                self._allocate(layer, param)
            out = [self.view(self.inputs[param.name], [n, -1]) for param in layer.params]
            self.b.call("fsdp::split_with_sizes_copy", rows, gathering.sizes, 1, out=out)
            return {param.name: self.inputs[param.name] for param in layer.params}
        taken = self._taken_apart(layer, rows, gathering.sizes)
        if not to_inputs and self.gathered is not self.dtype:
            return {name: self.b.call("aten::_to_copy", value, dtype=self.dtype) for name, value in taken.items()}
        if not to_inputs:
            return taken
        for param in layer.params:
            self._allocate(layer, param)
            self.b.call("fsdp::copy_", self.inputs[param.name], taken[param.name])
        if layer.record.twist == "overwritten":
            for value in taken.values():
                self.b.call("aten::zero_", value)
        if layer.record.twist == "written":
            self.b.call("aten::mul_.Tensor", self.inputs[layer.params[0].name], 0.5)
        return {param.name: self.inputs[param.name] for param in layer.params}

    def _taken_apart(self, layer: LayerParams, rows: fx.Node, sizes: list[int]) -> dict[str, fx.Node]:
        n = self.size(layer.dim)
        flat: list[fx.Node] = []
        if self.setting.copy_out == "whole" and len(sizes) == 1:
            flat = [rows]
        elif self.setting.copy_out in ("views", "whole"):
            pieces = self.b.call("aten::split_with_sizes", rows, sizes, 1)
            for number in range(len(sizes)):
                piece = self.b.getitem(pieces, number)
                flat.append(self.b.call("aten::clone", piece, memory_format=torch.contiguous_format))
        else:
            flat = [self.empty(n * size, self.gathered) for size in sizes]
            out = [self.view(place, [n, -1]) for place in flat]
            self.b.call("fsdp::split_with_sizes_copy", rows, sizes, 1, out=out)
        found = {}
        for param, place in zip(layer.params, flat, strict=True):
            whole = self.view(place, list(param.padded_shape))
            if param.padded:
                whole = self.b.call("aten::slice.Tensor", whole, 0, 0, param.shape[0])
            found[param.name] = whole
        return found

    # ------------------------------------------------------------------------------------------------ allocating, freeing

    def _bytes(self, param: Param) -> int:
        return math.prod(param.shape) * self.dtype.itemsize

    def _allocate(self, layer: LayerParams, param: Param) -> None:
        for _ in range(2 if layer.record.twist == "resize-full" else 1):
            self.b.call(RESIZE, self.inputs[param.name], self._bytes(param))
        self.whole.add(param.name)

    def _free(self, layer: LayerParams) -> None:
        if self.setting.target != "input":
            return
        if layer.record.late and layer not in self.tail:
            self.tail.append(layer)
            return
        for param in layer.params:
            if param.name not in self.whole:
                continue
            self.b.call(RESIZE, self.inputs[param.name], 0)
            self.whole.discard(param.name)
            if layer.record.twist == "free-twice":
                self.b.call(RESIZE, self.inputs[param.name], 0)

    def _flush(self, upcoming: LayerParams | None = None) -> None:
        """Free what is to be freed late; a layer's own parameters at the latest before it gathers them again."""
        for layer in list(self.tail):
            if upcoming is None or upcoming.of is layer.of:
                self._free(layer)
                self.tail.remove(layer)

    def _before_all(self, layer: LayerParams) -> None:
        if layer.of is not layer or self.setting.target != "input":
            return
        for param in layer.params:
            if layer.record.twist == "early-use":
                self.extras.append(self.b.call("aten::sum", self.inputs[param.name]))
            if self.setting.prologue:
                self.b.call(RESIZE, self.inputs[param.name], 0)
            else:
                self.whole.add(param.name)

    def _after_all(self) -> None:
        if self.setting.target != "input":
            return
        for layer in self.layers:
            if layer.record.twist in ("kept", "returned") and layer.of is layer:
                for param in layer.params:
                    self.b.call(RESIZE, self.inputs[param.name], self._bytes(param))
                    self.b.call(
                        "fsdp::copy_",
                        self.inputs[param.name],
                        self.b.call("aten::ones", list(param.shape), dtype=self.dtype),
                    )
                    if layer.record.twist == "returned":
                        self.extras.append(self.inputs[param.name])

    def _viewed(self, layer: LayerParams, weights: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """The parameters as the layer uses them."""
        found = dict(weights)
        first = layer.params[0]
        if layer.record.twist in ("by-view", "returned-view"):
            shape = list(first.shape)
            found[first.name] = self.view(self.view(found[first.name], [-1]), shape)
            if layer.record.twist == "returned-view":
                self.extras.append(self.b.call("aten::clone", found[first.name]))
        if first.name in self.stale and layer.number in self.full and len(first.shape) == 2:
            found[first.name] = self.b.call("aten::t", self.stale[first.name])
        return found

    # ----------------------------------------------------------------------------------------------------------- gradients

    def _reduced(self, layer: LayerParams, gradients: dict[str, fx.Node]) -> list[fx.Node]:
        """Reduce and scatter the gradients of a layer, side by side."""
        n = self.size(layer.dim)
        ordered = [gradients[param.name] for param in layer.params]
        rows = [-(-param.shape[0] // n) for param in layer.params]
        sizes = [r * math.prod(param.shape[1:]) for r, param in zip(rows, layer.params, strict=True)]
        dtype = BF16 if self.setting.dtypes in ("bf16", "low") else F32
        total = sum(sizes)
        buffer = self.empty(total * n, dtype)
        self.b.call("fsdp::chunk_cat", ordered, 0, n, out=self.view(buffer, [n, -1]))
        scattered = self.b.call(f"{_C10D}reduce_scatter_tensor", buffer, self.setting.reduce, n, layer.dim)
        reduced = self.b.call(f"{_C10D}wait_tensor", scattered)
        other = self._other(layer.dim)
        if other is not None:
            reduced = self.b.call(f"{_C10D}all_reduce", reduced, "avg", other)
            reduced = self.b.call(f"{_C10D}wait_tensor", reduced)
        pieces = self.b.call("aten::split_with_sizes", reduced, sizes, 0)
        found = []
        for number, param in enumerate(layer.params):
            gradient = self.view(self.b.getitem(pieces, number), [rows[number], *param.shape[1:]])
            held = self.inputs.get(f"{param.name}_grad")
            if held is not None and rows[number] == param.padded_shape[0] // n:
                self.b.call("aten::add_.Tensor", held, gradient)
            elif self.setting.accumulate == "cast" and dtype is not F32:
                found.append(self.b.call("aten::_to_copy", gradient, dtype=F32))
            else:
                found.append(gradient)
        return found

    def _other(self, dim: str) -> str | None:
        """Another mesh dim to reduce over, if the groups of both dims have equal sizes."""
        if not self.setting.hybrid:
            return None
        others = [name for name in self.roles.members if name != dim]
        return next((name for name in others if len(self.roles.members[dim]) == 1), None)


__all__ = ["FsdpWriter"]
