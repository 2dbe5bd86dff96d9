"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   x2: [1, 2] = input
#   w: [2, 2] = input
#   w2: [2, 2] = input
#   view: [2] = view(x2, [2])
#   matmul_all_reduce: [1, 2] = matmul_all_reduce(x, w, None, 0, [0, 1])
#   all_reduce: [2] = all_reduce(view, 0, [0, 1])
#   matmul: [1, 2] = matmul(matmul_all_reduce, w2)
#   return (all_reduce, matmul)

PASS = 'tests.mutants.multistream:GateBehindAView'
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
KIND = 'anchor-mismatch'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["dp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"x2","shape":[1,2],"dtype":"float32","placements":[],"r'
    'ecipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[["d'
    'p","varying"]],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w2","shape":[2,2],"dtype":"float32"'
    ',"placements":[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"pla'
    'ceholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"'
    'name":"x2","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"flo'
    'at32","alias":1}},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride"'
    ':[2,1],"dtype":"float32","alias":2}},{"name":"w2","op":"placeholder","target":"","args":[],"val":{"s'
    'hape":[2,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"view","op":"call_function","target'
    '":"aten::view","args":[{"node":"x2"},[2]],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":'
    '1},"meta":{"cost_s":1e-06}},{"name":"matmul_all_reduce","op":"call_function","target":"tensor_cast::'
    'matmul_all_reduce","args":[{"node":"x"},{"node":"w"},null,{"rank_constant":"rank"},{"rank_constant":'
    '"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"n'
    'ame":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"view"},{"'
    'rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2],"stride":[1],"dtype":"float32","al'
    'ias":5},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args'
    '":[{"node":"matmul_all_reduce"},{"node":"w2"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32"'
    ',"alias":6},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"'
    'node":"all_reduce"},{"node":"matmul"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},'
    '{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups","reo'
    'rdered","extra-outputs","overlap","branches=4","all-gather","all-reduce","binary","fused-norm","fuse'
    'd-reduce","in-place","matmul","quantised","transpose","view","write","timed","rank-dependent-costs"]'
    ',"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
