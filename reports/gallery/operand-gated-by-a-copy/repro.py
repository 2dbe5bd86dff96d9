"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   x2: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   copy_: [1, 2] = copy_(x2, x)
#   return all_reduce

PASS = 'tests.mutants.multistream:WrittenOperandGated'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"x2","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"x2","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"all_reduce","'
    'op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank"}'
    ',{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"c'
    'ost_s":1e-06}},{"name":"copy_","op":"call_function","target":"aten::copy_","args":[{"node":"x2"},{"n'
    'ode":"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1},"meta":{"cost_s":1e-06}}'
    ',{"name":"output","op":"output","target":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"graph":0,"'
    'constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":['
    '"layers=0","bsh","two-groups","reordered","extra-outputs","overlap","branches=2","all-reduce","all-t'
    'o-all","binary","fused-norm","fused-reduce","in-place","marker","matmul","norm","operator","reduce-s'
    'catter","slice","transpose","unary","write","timed"],"streams":{"compute":[0],"comm":[1],"sync_overh'
    'ead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
