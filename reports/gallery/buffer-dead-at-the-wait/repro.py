"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   weight: [1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(v, 'max', 'tp')
#   wait_tensor: [1, 2] = wait_tensor(all_reduce)
#   all_reduce_1: [1, 2] = all_reduce(weight, 'max', 'tp')
#   wait_tensor_1: [1, 2] = wait_tensor(all_reduce_1)
#   add: [1, 2] = add.Tensor(weight, all_reduce)
#   return add

PASS = 'tests.mutants.comm_buffers:FreesAtTheWait'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"weight","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"un'
    'iform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"weight","op":"placeholder",'
    '"target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v",'
    '"op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alia'
    's":1}},{"name":"all_reduce","op":"call_function","target":"_c10d_functional::all_reduce","args":[{"n'
    'ode":"v"},"max","tp"],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"wai'
    't_tensor","op":"call_function","target":"_c10d_functional::wait_tensor","args":[{"node":"all_reduce"'
    '}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"all_reduce_1","op":"ca'
    'll_function","target":"_c10d_functional::all_reduce","args":[{"node":"weight"},"max","tp"],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"wait_tensor_1","op":"call_function'
    '","target":"_c10d_functional::wait_tensor","args":[{"node":"all_reduce_1"}],"val":{"shape":[1,2],"st'
    'ride":[2,1],"dtype":"float32","alias":3}},{"name":"add","op":"call_function","target":"aten::add.Ten'
    'sor","args":[{"node":"weight"},{"node":"all_reduce"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":4}},{"name":"output","op":"output","target":"","args":[{"node":"add"}]}]}],"ranks":['
    '{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["functional","data-paralle'
    'l","after","bucket","gradient","in-place","integers","write","write-behind","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
