"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x2: [2] = input
#   x3: [2] = input
#   w: [2, 2] = input
#   matmul_all_reduce: [2] = matmul_all_reduce(x3, w, None, 0, [0, 1])
#   all_reduce: [2] = all_reduce(x2, 0, [0, 1])
#   mul_: [2] = mul_.Tensor(matmul_all_reduce, 1.0)
#   return all_reduce

PASS = 'tests.mutants.multistream:CollectivesUnordered'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'identity': False,
    'schedule': True,
    'overlap': True,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'unordered-collectives'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x2","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform"'
    ',"scale":1.0}},{"name":"x3","shape":[2],"dtype":"float32","placements":[["tp","partial(sum)"]],"reci'
    'pe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"rec'
    'ipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x2","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"x3","op":"placeho'
    'lder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"w'
    '","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","al'
    'ias":2}},{"name":"matmul_all_reduce","op":"call_function","target":"tensor_cast::matmul_all_reduce",'
    '"args":[{"node":"x3"},{"node":"w"},null,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"sha'
    'pe":[2],"stride":[1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"all_reduce","op"'
    ':"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x2"},{"rank_constant":"rank"},{'
    '"rank_constant":"tp"}],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":4},"meta":{"cost_s"'
    ':1e-06}},{"name":"mul_","op":"call_function","target":"aten::mul_.Tensor","args":[{"node":"matmul_al'
    'l_reduce"},1.0],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}'
    '},{"name":"output","op":"output","target":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"graph":0,'
    '"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":'
    '["layers=0","rank-reduced","two-groups","reordered","extra-outputs","overlap","branches=3","all-redu'
    'ce","all-to-all","binary","fused-norm","fused-reduce","in-place","index","marker","matmul","norm","o'
    'perator","reduce-scatter","split","unary","timed"],"streams":{"compute":[0],"comm":[1],"sync_overhea'
    'd_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
