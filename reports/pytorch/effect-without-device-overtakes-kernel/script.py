"""torch.compile on CPU: code that Inductor generates reads an input behind its `del`, if an op without tensors has an ordered effect.

One process. What is called of the generated code is its Python wrapper; no C++ is compiled, the kernel is a stand-in.
"""

import os
import sys

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TENSORIFY_PYTHON_SCALARS"] = "0"  # torch 2.9.1 loses the barrier there, before Inductor sees it

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

cpu_vec_isa.valid_vec_isa_list = list  # scalar C++, which nobody compiles
AsyncCompile.cpp_pybinding = lambda self, types, source: lambda *arguments: calls.append("kernel")
calls = []

library = torch.library.Library("demo", "DEF")
library.define("barrier(str group) -> ()")
library.impl("barrier", lambda group: calls.append("barrier"), "CompositeExplicitAutograd")
torch.library.register_fake("demo::barrier", lambda group: None)
_register_effectful_op(torch.ops.demo.barrier.default, _EffectType.ORDERED)


def step(count, gradient):
    count.add_(1)
    reduced = gradient.sum(0)
    torch.ops.demo.barrier("world")
    return reduced


print(f"torch {torch.__version__}\nexpected: the generated code runs, the kernel before the barrier")
try:
    torch.compile(step, fullgraph=True)(torch.zeros(7), torch.ones(3, 4))
except (UnboundLocalError, NameError) as error:
    print(f"got: {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(1)  # workers of the compiler can hold up the end
print(f"got: {calls}")
sys.stdout.flush()
os._exit(0)
