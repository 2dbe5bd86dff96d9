"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   all_gather_into_tensor: [2, 2] = all_gather_into_tensor(v, 2, 'tp')
#   wait_tensor: [2, 2] = wait_tensor(all_gather_into_tensor)
#   resize_storage_bytes_ = resize_storage_bytes_(v, 0)
#   return ()

PASS = 'tests.mutants.overlap:FreeBeforeCompletion'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_gather_into_tensor","op":"call_'
    'function","target":"_c10d_functional::all_gather_into_tensor","args":[{"node":"v"},2,"tp"],"val":{"s'
    'hape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"wait_tensor","op":"call_function",'
    '"target":"_c10d_functional::wait_tensor","args":[{"node":"all_gather_into_tensor"}],"val":{"shape":['
    '2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"resize_storage_bytes_","op":"call_functio'
    'n","target":"inductor::resize_storage_bytes_","args":[{"node":"v"},0],"val":{"scalar":null}},{"name"'
    ':"output","op":"output","target":"","args":[{"tuple":[]}]}]}],"ranks":[{"graph":0,"constants":{}},{"'
    'graph":0,"constants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
