"""A library's op as compilers see it: a signature and a fake kernel. What it computes is not needed here."""

import torch


@torch.library.custom_op("mylib::rope", mutates_args=())
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("runs on our accelerator alone")


@rope.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def model(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    functional = torch.ops._c10d_functional
    total = functional.wait_tensor(functional.all_reduce(x @ weight, "sum", "tp"))
    return rope(total, cos, sin)


def graph():
    """The graph of a rank, for `tcverify check`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        inputs = [torch.empty(8, 16), torch.empty(16, 16), torch.empty(8, 16), torch.empty(8, 16)]
        return make_fx(model)(*inputs), inputs


def by_halves(gm: torch.fx.GraphModule) -> None:
    """A pass: rotate the rows in two halves, so that the second can overlap with something."""
    rope_ = next(node for node in gm.graph.nodes if node.target is torch.ops.mylib.rope.default)
    slice_, cat = torch.ops.aten.slice.Tensor, torch.ops.aten.cat.default

    def call(target, *args):
        node = gm.graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda one: one.meta["val"]))
        return node

    with gm.graph.inserting_before(rope_), rope_.meta["val"].fake_mode:
        halves = [call(rope_.target, *(call(slice_, x, 0, start, start + 4) for x in rope_.args)) for start in (0, 4)]
        whole = call(cat, halves, 0)
    rope_.replace_all_uses_with(whole)
    gm.graph.erase_node(rope_)
