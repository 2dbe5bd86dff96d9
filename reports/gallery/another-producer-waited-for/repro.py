"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x2: [1, 2] = input
#   x3: [1, 2] = input
#   w: [2, 2] = input
#   bias: [2] = input
#   w2: [2, 2] = input
#   w3: [2, 1] = input
#   matmul_all_reduce: [1, 2] = matmul_all_reduce(x3, w, bias, 0, [0, 1])
#   all_reduce: [1, 2] = all_reduce(matmul_all_reduce, 0, [0])
#   matmul: [2] = matmul(bias, w2)
#   matmul_2: [1, 1] = matmul(x2, w3)
#   return (all_reduce, matmul_2, matmul)

PASS = 'tests.mutants.multistream:WaitForAnotherProducer'
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
KIND = 'race'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x2","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"x3","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[["'
    'tp","varying"]],"recipe":{"kind":"uniform","scale":1.0}},{"name":"bias","shape":[2],"dtype":"float32'
    '","placements":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w2","shape":[2,2],"dtype":"float'
    '32","placements":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w3","shape":[2,1],"dtype":"flo'
    'at32","placements":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x2","op'
    '":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":'
    '0}},{"name":"x3","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype'
    '":"float32","alias":1}},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"s'
    'tride":[2,1],"dtype":"float32","alias":2}},{"name":"bias","op":"placeholder","target":"","args":[],"'
    'val":{"shape":[2],"stride":[1],"dtype":"float32","alias":3}},{"name":"w2","op":"placeholder","target'
    '":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"w3","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":5}}'
    ',{"name":"matmul_all_reduce","op":"call_function","target":"tensor_cast::matmul_all_reduce","args":['
    '{"node":"x3"},{"node":"w"},{"node":"bias"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":6},"meta":{"cost_s":1e-06}},{"name":"all_reduc'
    'e","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"matmul_all_reduce"},{"ra'
    'nk_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","'
    'alias":7},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","ar'
    'gs":[{"node":"bias"},{"node":"w2"}],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":8},"me'
    'ta":{"cost_s":1e-05}},{"name":"matmul_2","op":"call_function","target":"aten::matmul","args":[{"node'
    '":"x2"},{"node":"w3"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":9},"meta":{"cos'
    't_s":2.412e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"all_reduce"},'
    '{"node":"matmul_2"},{"node":"matmul"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0],"tp"'
    ':[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[1],"tp":[0,1]}}],"seed":0,"labels":["layers=0","flat'
    '","bf16","mixed-dtypes","two-groups","reordered","extra-outputs","overlap","branches=3","all-gather"'
    ',"all-reduce","binary","cat","filled","fused-norm","fused-reduce","index","marker","matmul","operato'
    'r","unary","timed"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":1e-06,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
