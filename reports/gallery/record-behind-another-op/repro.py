"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   v: [1, 2] = input
#   mul_: [1, 2] = mul_.Tensor(x, 1.0)
#   all_gather: [2, 2] = all_gather(v, 0, 0, [0, 1])
#   return all_gather

PASS = 'tests.mutants.multistream:RecordedWhereNeeded'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'anchor-mismatch'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"mul_","op":"cal'
    'l_function","target":"aten::mul_.Tensor","args":[{"node":"x"},1.0],"val":{"shape":[1,2],"stride":[2,'
    '1],"dtype":"float32","alias":0},"meta":{"cost_s":1e-06}},{"name":"all_gather","op":"call_function","'
    'target":"tensor_cast::all_gather","args":[{"node":"v"},0,{"rank_constant":"rank"},{"rank_constant":"'
    'tp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"cost_s":1e-05}},{"na'
    'me":"output","op":"output","target":"","args":[{"node":"all_gather"}]}]}],"ranks":[{"graph":0,"const'
    'ants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["laye'
    'rs=0","flat","two-groups","extra-outputs","overlap","branches=3","all-gather","all-reduce","binary",'
    '"cast","filled","fused-norm","fused-reduce","in-place","marker","matmul","reduce-scatter","unary","t'
    'imed"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
