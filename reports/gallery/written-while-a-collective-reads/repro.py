"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   v_1: [2, 2] = input
#   reduce_scatter_tensor: [1, 2] = reduce_scatter_tensor(v_1, 'sum', 2, 'dp')
#   wait_tensor: [1, 2] = wait_tensor(reduce_scatter_tensor)
#   mul_: [2, 2] = mul_.Tensor(v_1, 1.0)
#   return v

PASS = 'tests.mutants.overlap:WriteDuringReadAllowed'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'order': True,
    'collective_order': True,
}
KIND = 'async-race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v_1","shape":[2,2],"dtype":"float32","placements":[["dp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v_1","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"reduce_scatter_tensor","op":"call_function","target":"_c10d_functional::reduce_scatter_ten'
    'sor","args":[{"node":"v_1"},"sum",2,"dp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","ali'
    'as":2}},{"name":"wait_tensor","op":"call_function","target":"_c10d_functional::wait_tensor","args":['
    '{"node":"reduce_scatter_tensor"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},'
    '{"name":"mul_","op":"call_function","target":"aten::mul_.Tensor","args":[{"node":"v_1"},1.0],"val":{'
    '"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"output","op":"output","target":"'
    '","args":[{"node":"v"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0'
    ',"labels":["functional","async-tp","coalesced","pipelined","write-behind"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
