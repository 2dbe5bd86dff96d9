"""Program files: what is written is what is read, and whatever is wrong becomes one ProgramError that names the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import ProgramError
from tcverify.program import (
    PARTIAL,
    GraphBuilder,
    InputSpec,
    Mesh,
    NotSerialisable,
    Program,
    RankBinding,
    decoding,
    dumps,
    loads,
    program_id,
    spmd_program,
)
from tcverify.program import codec as codec_module
from tcverify.program.values import encode_value
from tests.sizes import by_night

WHERE = "case.json"


def program() -> Program:
    mesh = Mesh.grid({"tp": 2})
    inputs = [InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)), InputSpec("gain", (8,))]

    def build(b: GraphBuilder) -> Any:
        x, gain = b.input("x"), b.input("gain")
        total = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        wide = b.call("aten::_to_copy", total, dtype=torch.float64, memory_format=torch.contiguous_format)
        pair = b.call("tensor_cast::add_rms_norm2", total, total, gain, 1e-6)
        return {"both": (b.getitem(pair, 0), [b.getitem(pair, 1)]), "wide": b.call("aten::clamp", wide, -1.0)}

    return spmd_program(mesh, inputs, build, seed=7, labels=["hand-made"])


def test_a_program_is_read_as_it_was_written() -> None:
    text = dumps(program())
    again = loads(text)
    assert dumps(again) == text
    assert again.inputs == program().inputs
    assert again.seed == 7
    assert again.labels == ("hand-made",)


def test_bytes_are_read_as_text_is() -> None:
    text = dumps(program())
    assert dumps(loads(text.encode())) == text


def test_equal_programs_have_one_id() -> None:
    assert program_id(program()) == program_id(loads(dumps(program())))


@pytest.mark.parametrize(
    "value",
    [
        -0.0, 1e-300, float("inf"), float("-inf"), -(2**62), True, None, "text", slice(None, 3, 2), Ellipsis,
        [1, [2.5]], (1, (2,)), {"a": [1]}, torch.bfloat16, torch.device("cpu"), torch.strided, torch.channels_last,
    ],
    ids=repr,
)  # fmt: skip
def test_constants_are_kept_exactly(value: Any) -> None:
    graph = fx.Graph()
    graph.output((value,))
    mesh = Mesh.grid({"tp": 2})
    made = Program(mesh, (graph,), (RankBinding(0, {}),) * 2, ())
    (found,) = next(iter(loads(dumps(made)).graphs[0].nodes)).args[0]
    assert repr(found) == repr(value)
    assert type(found) is type(value) or isinstance(value, (list, dict))  # fx makes its own lists and dicts


def test_not_a_number_is_kept() -> None:
    graph = fx.Graph()
    graph.output((float("nan"),))
    made = Program(Mesh.grid({"tp": 2}), (graph,), (RankBinding(0, {}),) * 2, ())
    assert '{"float":"nan"}' in dumps(made)
    assert dumps(loads(dumps(made))) == dumps(made)


@pytest.mark.parametrize("value", [1j, {1: 2}, b"bytes", print], ids=repr)
def test_foreign_constants_cannot_be_written(value: Any) -> None:
    with pytest.raises(NotSerialisable, match="cannot be written"):
        encode_value(value)


# --------------------------------------------------------------------------------------------------- hostile files

TEXTS = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "truncated": dumps(program())[:-40],
    "trailing text": dumps(program()) + "x",
    "not utf-8": b"\xff\xfe{}",
    "NaN": dumps(program()).replace('"seed":7', '"seed":NaN'),
    "Infinity": dumps(program()).replace('"seed":7', '"seed":-Infinity'),
    "a duplicate key": dumps(program()).replace('"seed":7', '"seed":7,"seed":8'),
    "a pickle": b"\x80\x04K\x01.",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep arguments": dumps(program()).replace("[0,1]", "[" * 500 + "]" * 500, 1),
    "an integer of 5000 digits": dumps(program()).replace('"seed":7', '"seed":' + "9" * 5000),
    "a float beyond range": dumps(program()).replace('"scale":1.0', '"scale":1e999', 1),
    "a surrogate": dumps(program()).replace("hand-made", "\\ud800"),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_texts_that_are_no_program(text: str | bytes) -> None:
    with pytest.raises(ProgramError) as caught:
        loads(text, WHERE)
    assert WHERE in caught.value.message


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def _drop(*path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def _nodes(data: Any) -> Any:
    return data["graphs"][0]["nodes"]


def _swap_nodes(data: Any) -> None:
    nodes = _nodes(data)
    nodes[2], nodes[3] = nodes[3], nodes[2]


def _nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"tuple": [value]}
    return value


NODE = ("graphs", 0, "nodes", 2)  # the all_reduce

CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another format": (_set("format", to="elf"), "is not a tcverify program"),
    "no format": (_drop("format"), "is not a tcverify program"),
    "a later version": (_set("version", to=99), "version 99"),
    "a version of text": (_set("version", to="1"), "version '1'"),
    "true for a version": (_set("version", to=True), "version True"),
    "an unknown key": (_set("hook", to="x"), "unknown keys hook"),
    "a missing part": (_drop("ranks"), "lacks ranks"),
    "a mesh that is a list": (_set("mesh", to=[]), "mesh is not an object"),
    "a huge world": (_set("mesh", "world_size", to=10**9), "world size"),
    "a world of none": (_set("mesh", "world_size", to=0), "world_size"),
    "a world of another size": (_set("mesh", "world_size", to=3), "partition"),
    "a rank in no group": (_set("mesh", "dims", 0, "groups", to=[[0]]), "partition"),
    "a rank twice in a group": (_set("mesh", "dims", 0, "groups", to=[[0, 0, 1]]), "partition"),
    "mesh dims of one name": (lambda d: d["mesh"]["dims"].append(d["mesh"]["dims"][0]), "distinct names"),
    "an unknown mesh key": (_set("mesh", "torus", to=1), "unknown keys torus"),
    "too few ranks": (lambda d: d["ranks"].pop(), "2 ranks, but 1"),
    "a rank without graph": (_set("ranks", 1, "graph", to=4), "rank 1 runs graph 4"),
    "a rank of graph -1": (_set("ranks", 1, "graph", to=-1), "graph of rank 1"),
    "a rank lacks a constant": (_drop("ranks", 1, "constants", "tp"), "rank 1 gives no value to tp"),
    "a constant of text": (_set("ranks", 1, "constants", "tp", to="0"), "'tp' of rank 1"),
    "a constant of floats": (_set("ranks", 1, "constants", "tp", to=[0.5]), "'tp' of rank 1"),
    "a constant beyond 64 bits": (_set("ranks", 1, "constants", "rank", to=1 << 70), "'rank' of rank 1"),
    "constants in a list": (_set("ranks", 1, "constants", to=[]), "constants of rank 1"),
    "no graphs": (_set("graphs", to=[]), "rank 0 runs graph 0"),
    "a graph without nodes": (_set("graphs", 0, "nodes", to=[]), "does not end in its one output"),
    "a graph without output": (lambda d: _nodes(d).pop(), "does not end in its one output"),
    "two outputs": (lambda d: _nodes(d).append({**_nodes(d)[-1], "name": "again"}), "output"),
    "a forward reference": (_swap_nodes, "not defined before it"),
    "a cycle": (_set(*NODE, "args", 0, to={"node": "getitem"}), "not defined before it"),
    "a node that reads itself": (_set(*NODE, "args", 0, to={"node": "all_reduce"}), "not defined before it"),
    "an unhashable reference": (_set(*NODE, "args", 0, to={"node": ["x"]}), ""),
    "two nodes of one name": (_set(*NODE, "name", to="x"), "taken"),
    "a name that is no identifier": (_set(*NODE, "name", to="a b"), "taken or is not a Python identifier"),
    "a node without a name": (_drop(*NODE, "name"), ""),
    "a name of 2000 letters": (_set(*NODE, "name", to="a" * 2000), "short printable string"),
    "a label that steers the terminal": (_set("labels", to=["\x1b[2J"]), "short printable string"),
    "an unknown node key": (_set(*NODE, "code", to="1"), "unknown keys code"),
    "an unknown metadata key": (_set(*NODE, "meta", to={"stack": 1}), "unknown keys stack"),
    "a call of a module": (_set(*NODE, "op", to="call_module"), "call_module"),
    "an attribute": (_set(*NODE, "op", to="get_attr"), "get_attr"),
    "a method": (_set(*NODE, "op", to="call_method"), "call_method"),
    "an op that is a list": (_set(*NODE, "op", to=[]), "has op []"),
    "a late placeholder": (_set(*NODE, "op", to="placeholder"), ""),
    "an unknown op": (_set(*NODE, "target", to="tensor_cast::nothing"), "tensor_cast::nothing"),
    "an unknown dialect": (_set(*NODE, "target", to="os::system"), "os::system"),
    "an unknown aten op": (_set(*NODE, "target", to="aten::nothing"), "aten::nothing"),
    "a dunder of aten": (_set(*NODE, "target", to="aten::__class__"), "aten::__class__"),
    "a dunder overload": (_set(*NODE, "target", to="aten::add.__class__"), "aten::add.__class__"),
    "a method of the packet": (_set(*NODE, "target", to="aten::add.overloads"), "aten::add.overloads"),
    "eval": (_set(*NODE, "target", to="python::eval"), "python::eval"),
    "an import": (_set(*NODE, "target", to="python::os.system"), "python::os.system"),
    "a builtin": (_set(*NODE, "target", to="builtins::exec"), "builtins::exec"),
    "a foreign function": (_set(*NODE, "target", to="foreign::os.system"), "foreign::os.system"),
    "a name without dialect": (_set(*NODE, "target", to="all_reduce"), "all_reduce"),
    "an empty target": (_set(*NODE, "target", to=""), ""),
    "arguments in an object": (_set(*NODE, "args", to={}), "arguments of node 'all_reduce'"),
    "keyword arguments in a list": (_set(*NODE, "kwargs", to=[]), "keyword arguments"),
    "an argument of unknown kind": (_set(*NODE, "args", 1, to={"eval": "1"}), "eval"),
    "an argument of two kinds": (_set(*NODE, "args", 1, to={"tuple": [], "list": []}), "is not an argument"),
    "a nested argument": (_set(*NODE, "args", 1, to=_nest(100)), "nested too deeply"),
    "an integer beyond 64 bits": (_set(*NODE, "args", 1, to=1 << 64), "argument of node 'all_reduce'"),
    "a slice of one": (_set(*NODE, "args", 1, to={"slice": [1]}), ""),
    "a dict of singles": (_set(*NODE, "args", 1, to={"dict": [[1]]}), ""),
    "a rank constant that is a number": (_set(*NODE, "args", 1, to={"rank_constant": 3}), "rank constant"),
    "a rank constant without value": (_set(*NODE, "args", 1, to={"rank_constant": "zz"}), "zz"),
    "a float by name": (_set(*NODE, "args", 1, to={"float": "1e3"}), "float"),
    "a device of the network": (_set(*NODE, "args", 1, to={"device": "meta:7"}), "device"),
    "an unhashable layout": (_set(*NODE, "args", 1, to={"layout": []}), ""),
    "an unhashable memory format": (_set(*NODE, "args", 1, to={"memory_format": {}}), ""),
    "a dtype of torch that is none": (_set(*NODE, "val", "dtype", to="nn"), "'nn' is not a dtype"),
    "a dtype in a list": (_set(*NODE, "val", "dtype", to=["float32"]), "is not a dtype"),
    "a negative size": (_set(*NODE, "val", "shape", to=[-4, 8]), "a size of node 'all_reduce'"),
    "a size of 2^60": (_set(*NODE, "val", "shape", to=[1 << 60, 8]), "a size of node 'all_reduce'"),
    "a missing stride": (_set(*NODE, "val", "stride", to=[1]), "2 sizes and 1 strides"),
    "a negative alias": (_set(*NODE, "val", "alias", to=-1), "alias"),
    "val without shape": (_drop(*NODE, "val", "shape"), ""),
    "nested val": (_set(*NODE, "val", to=_nest(100)), "nested too deeply"),
    "no input of a placeholder": (lambda d: d["inputs"].pop(), "has no input of its name"),
    "inputs of one name": (lambda d: d["inputs"].append(d["inputs"][0]), "share a name"),
    "an input of unknown dtype": (_set("inputs", 0, "dtype", to="float33"), "'float33' is not a dtype"),
    "an input of negative size": (_set("inputs", 0, "shape", to=[-1]), "a size of input 'x'"),
    "an input of true size": (_set("inputs", 0, "shape", to=[True]), "a size of input 'x'"),
    "an unknown recipe": (_set("inputs", 0, "recipe", "kind", to="exec"), "'exec' is not an input recipe"),
    "a scale of text": (_set("inputs", 0, "recipe", "scale", to="1"), "scale of input 'x'"),
    "a scale beyond float": (_set("inputs", 0, "recipe", "scale", to=10**400), ""),
    "an unknown placement": (_set("inputs", 0, "placements", 0, 1, to="shard(x)"), "is not a placement"),
    "a placement over no dim": (_set("inputs", 0, "placements", 0, 0, to="zz"), "no dim 'zz'"),
    "a shard of no dim": (_set("inputs", 0, "placements", 0, 1, to="shard(7)"), "cannot be sharded on dim 7"),
    "a placement of one": (_set("inputs", 0, "placements", 0, to=["tp"]), ""),
    "a negative seed": (_set("seed", to=-1), "seed"),
    "a seed of text": (_set("seed", to="7"), "seed"),
    "labels that are numbers": (_set("labels", to=[1]), "label"),
}


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_files_that_are_wrong_in_one_place(change: Callable[[Any], None], says: str) -> None:
    data = copy.deepcopy(json.loads(dumps(program())))
    change(data)
    with pytest.raises(ProgramError) as caught:
        loads(json.dumps(data), WHERE)
    assert WHERE in caught.value.message
    assert says in caught.value.message


def test_a_file_beyond_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "MAX_BYTES", 1000)
    with pytest.raises(ProgramError, match="at most 1000 are read"):
        loads(" " * 1001, WHERE)


def test_a_graph_beyond_the_limit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_NODES", 3)
    with pytest.raises(ProgramError, match="at most 3 are read"):
        loads(dumps(program()), WHERE)


def test_a_chain_of_thousands_of_nodes_round_trips() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        for _ in range(by_night(10_000, 2_000)):
            x = b.call("tensor_cast::silu", x)
        return x

    text = dumps(spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 2))], build))
    assert dumps(loads(text)) == text


def _change_output(data: Any, args: list[Any]) -> None:
    _nodes(data)[-1]["args"] = args


def _stretch(data: Any) -> None:
    _nodes(data)[0]["val"].update(shape=[1 << 40, 1 << 40], stride=[1 << 40, 1])


@pytest.mark.parametrize(
    "change",
    [
        lambda data: _change_output(data, []),
        lambda data: _change_output(data, _nodes(data)[-1]["args"] * 2),
        _stretch,
        lambda data: data["inputs"][0].update(dtype="quint8"),
    ],
)
def test_files_that_no_executor_could_run_are_refused(change: Callable[[Any], None]) -> None:
    data = json.loads(dumps(program()))
    change(data)
    with pytest.raises(ProgramError):
        loads(json.dumps(data))


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_integers_that_no_reader_takes_are_not_written(value: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, value)))
    with pytest.raises(NotSerialisable):
        dumps(program().with_graphs([graph] * program().world_size))


def test_metadata_that_names_a_later_node_is_not_written() -> None:
    changed = program()
    first, *_, last = [n for n in changed.graphs[0].nodes if n.op == "call_function"]
    first.meta["after"] = [last]
    with pytest.raises(NotSerialisable, match="not defined before"):
        dumps(changed)
