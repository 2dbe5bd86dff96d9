"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   v_1: [1, 2] = input
#   wait_tensor: [1, 2] = wait_tensor(v)
#   all_reduce_: [1, 2] = all_reduce_(v_1, 'sum', 'tp')
#   wait_tensor_1: [1, 2] = wait_tensor(all_reduce_)
#   slice_1: [1, 2] = slice.Tensor(wait_tensor_1, 0, 0, 6)
#   return slice_1

PASS = 'tests.mutants.overlap:ViewsOfErasedWaits'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'order': True,
    'collective_order': True,
}
KIND = 'malformed-graph'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v_1","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v_1","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"wait_tensor","op":"call_function","target":"_c10d_functional::wait_tensor","args":[{"node"'
    ':"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_reduce_","op":'
    '"call_function","target":"_c10d_functional::all_reduce_","args":[{"node":"v_1"},"sum","tp"],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"wait_tensor_1","op":"call_functio'
    'n","target":"_c10d_functional::wait_tensor","args":[{"node":"all_reduce_"}],"val":{"shape":[1,2],"st'
    'ride":[2,1],"dtype":"float32","alias":1}},{"name":"slice_1","op":"call_function","target":"aten::sli'
    'ce.Tensor","args":[{"node":"wait_tensor_1"},0,0,6],"val":{"shape":[1,2],"stride":[2,1],"dtype":"floa'
    't32","alias":1}},{"name":"output","op":"output","target":"","args":[{"node":"slice_1"}]}]}],"ranks":'
    '[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["functional","data-parall'
    'el","gradient","in-place","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
