"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   w: [2, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   neg: [1, 2] = neg(x)
#   matmul_all_reduce: [1, 2] = matmul_all_reduce(neg, w, None, 0, [0, 1])
#   return (matmul_all_reduce, all_reduce)

PASS = 'tests.mutants.multistream:CollectivesUnordered'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'schedule': True,
    'overlap': True,
}
KIND = 'unordered-collectives'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[["tp","varying"]],"recipe"'
    ':{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","ar'
    'gs":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"w","op":"placehold'
    'er","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":'
    '"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_con'
    'stant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias"'
    ':2},"meta":{"cost_s":1e-06}},{"name":"neg","op":"call_function","target":"aten::neg","args":[{"node"'
    ':"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"n'
    'ame":"matmul_all_reduce","op":"call_function","target":"tensor_cast::matmul_all_reduce","args":[{"no'
    'de":"neg"},{"node":"w"},null,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"'
    'stride":[2,1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","'
    'target":"","args":[{"tuple":[{"node":"matmul_all_reduce"},{"node":"all_reduce"}]}]}]}],"ranks":[{"gr'
    'aph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"l'
    'abels":["layers=0","bsh","few-tokens","extra-outputs","overlap","branches=2","all-gather","all-reduc'
    'e","binary","fused-norm","fused-reduce","marker","matmul","operator","slice","transpose","unary","ti'
    'med"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
