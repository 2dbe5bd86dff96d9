"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 'sum', 'dp')
#   all_reduce_1: [1, 2] = all_reduce(x, 'sum', 'dp')
#   wait_tensor: [1, 2] = wait_tensor(all_reduce_1)
#   all_gather_into_tensor: [1, 2] = all_gather_into_tensor(x, 1, 'tp')
#   wait_tensor_1: [1, 2] = wait_tensor(all_gather_into_tensor)
#   wait_tensor_2: [1, 2] = wait_tensor(all_reduce)
#   return v

PASS = 'tests.mutants.comm_buffers:FreesAtTheStart'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'collective_order': True,
}
KIND = 'overlapping-buffers'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']},{"name":"tp","groups":[[0],[1]]}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placeme'
    'nts":[["dp","varying"]],"recipe":{"kind":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"'
    'float32","placements":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","'
    'op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias'
    '":0}},{"name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtyp'
    'e":"float32","alias":1}},{"name":"all_reduce","op":"call_function","target":"_c10d_functional::all_r'
    'educe","args":[{"node":"x"},"sum","dp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias'
    '":2}},{"name":"all_reduce_1","op":"call_function","target":"_c10d_functional::all_reduce","args":[{"'
    'node":"x"},"sum","dp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"wa'
    'it_tensor","op":"call_function","target":"_c10d_functional::wait_tensor","args":[{"node":"all_reduce'
    '_1"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"all_gather_into_ten'
    'sor","op":"call_function","target":"_c10d_functional::all_gather_into_tensor","args":[{"node":"x"},1'
    ',"tp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"wait_tensor_1","op'
    '":"call_function","target":"_c10d_functional::wait_tensor","args":[{"node":"all_gather_into_tensor"}'
    '],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"wait_tensor_2","op":"ca'
    'll_function","target":"_c10d_functional::wait_tensor","args":[{"node":"all_reduce"}],"val":{"shape":'
    '[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args"'
    ':[{"node":"v"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels'
    '":["functional","tensor-parallel","all-to-all","buffer","column-row","in-place","write-behind","time'
    'd"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
