"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   w: [2, 2] = input
#   v: [1, 2] = input
#   all_gather: [2, 2] = all_gather(v, 0, 0, [0, 1])
#   matmul: [1, 2] = matmul(v, w)
#   return (all_gather, matmul)

PASS = 'tests.mutants.multistream:OutputsNotJoined'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"w","op":"placeholder","target":"","args":[],"val":{"s'
    'hape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"all_gather","op'
    '":"call_function","target":"tensor_cast::all_gather","args":[{"node":"v"},0,{"rank_constant":"rank"}'
    ',{"rank_constant":"tp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"c'
    'ost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args":[{"node":"v"},{"'
    'node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}'
    '},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"all_gather"},{"node":"matmul'
    '"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"t'
    'p":[0,1]}}],"seed":0,"labels":["layers=0","bsh","bf16","mixed-dtypes","two-groups","reordered","extr'
    'a-outputs","overlap","branches=1","all-gather","all-reduce","binary","cat","filled","fused-reduce","'
    'matmul","quantised","split","transpose","unary","view","timed","rank-dependent-costs"],"streams":{"c'
    'ompute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
