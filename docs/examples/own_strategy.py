"""A custom strategy: a row-parallel linear layer with a bias."""

from hypothesis import strategies as st

from tcverify import InputSpec, Mesh, register_strategy, shard, spmd_program


def linear_layers(mesh=None, world_size=None):
    """Draws matmul → all_reduce → add, in several sizes. Called with a mesh, or with a number of ranks."""
    mesh = mesh or Mesh.grid({"tp": world_size or 2})
    tp, ranks = mesh.dims[-1].name, len(mesh.dims[-1].groups[0])

    def build(b):
        x, weight, bias = b.input("x"), b.input("weight"), b.input("bias")
        total = b.call("tensor_cast::all_reduce", b.call("aten::mm", x, weight), b.rank, b.group(tp))
        return b.call("aten::add.Tensor", total, bias)

    def program(sizes):
        rows, inner, columns = sizes
        x = InputSpec("x", (rows, inner * ranks), placements=((tp, shard(1)),))
        weight = InputSpec("weight", (inner * ranks, columns), placements=((tp, shard(0)),))
        return spmd_program(mesh, [x, weight, InputSpec("bias", (columns,))], build)

    return st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8)).map(program)


register_strategy("linear-layers", linear_layers)
