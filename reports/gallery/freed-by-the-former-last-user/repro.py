"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   gain: [2] = input
#   sin: [1, 2] = sin(x)
#   add: [1, 2] = add.Tensor(x, x)
#   sin_1: [1, 2] = sin(add)
#   mul_: [1, 2] = mul_.Tensor(sin, 1.0)
#   reduce_scatter_tensor: [1, 2] = reduce_scatter_tensor(sin_1, 'sum', 1, 'dp')
#   wait_tensor: [1, 2] = wait_tensor(reduce_scatter_tensor)
#   rms_norm: [1, 2] = rms_norm(sin_1, gain, 1e-06)
#   abs_1: [1, 2] = abs(rms_norm)
#   return abs_1

PASS = 'tests.mutants.overlap_memory:LastUserStays'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
    'overlap': True,
    'order': True,
    'collective_order': True,
    'memory_budget': 0.0,
}
KIND = 'peak-memory'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0],['
    '1]]}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"placeholder","targe'
    't":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"sin","op":"ca'
    'll_function","target":"aten::sin","args":[{"node":"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":'
    '"float32","alias":2}},{"name":"add","op":"call_function","target":"aten::add.Tensor","args":[{"node"'
    ':"x"},{"node":"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"sin_1'
    '","op":"call_function","target":"aten::sin","args":[{"node":"add"}],"val":{"shape":[1,2],"stride":[2'
    ',1],"dtype":"float32","alias":4}},{"name":"mul_","op":"call_function","target":"aten::mul_.Tensor","'
    'args":[{"node":"sin"},1.0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name"'
    ':"reduce_scatter_tensor","op":"call_function","target":"_c10d_functional::reduce_scatter_tensor","ar'
    'gs":[{"node":"sin_1"},"sum",1,"dp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5}'
    '},{"name":"wait_tensor","op":"call_function","target":"_c10d_functional::wait_tensor","args":[{"node'
    '":"reduce_scatter_tensor"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name'
    '":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"sin_1"},{"node":'
    '"gain"},1e-06],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":6}},{"name":"abs_1","op'
    '":"call_function","target":"aten::abs","args":[{"node":"rms_norm"}],"val":{"shape":[1,2],"stride":[2'
    ',1],"dtype":"float32","alias":7}},{"name":"output","op":"output","target":"","args":[{"node":"abs_1"'
    '}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["functiona'
    'l","any","after","blocking","gradient","in-place","pipeline","rank-dependent","swapped","write-befor'
    'e","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
