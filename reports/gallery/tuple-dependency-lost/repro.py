"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   w: [2, 2] = input
#   matmul: [1, 2] = matmul(x, w)
#   matmul_1: [1, 2] = matmul(x, w)
#   getitem: [2] = matmul_1[0]
#   all_reduce: [2] = all_reduce(getitem, 0, [0, 1])
#   return (matmul, all_reduce)

PASS = 'tests.mutants.multistream:TupleDependencyUntracked'
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
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"w","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"matmul","op":"c'
    'all_function","target":"aten::matmul","args":[{"node":"x"},{"node":"w"}],"val":{"shape":[1,2],"strid'
    'e":[2,1],"dtype":"float32","alias":2},"meta":{"cost_s":1e-06}},{"name":"matmul_1","op":"call_functio'
    'n","target":"aten::matmul","args":[{"node":"x"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"d'
    'type":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"getitem","op":"call_function","target":'
    '"python::getitem","args":[{"node":"matmul_1"},0],"val":{"shape":[2],"stride":[1],"dtype":"float32","'
    'alias":3},"meta":{"cost_s":1e-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::'
    'all_reduce","args":[{"node":"getitem"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shap'
    'e":[2],"stride":[1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"output","op":"out'
    'put","target":"","args":[{"tuple":[{"node":"matmul"},{"node":"all_reduce"}]}]}]}],"ranks":[{"graph":'
    '0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels'
    '":["layers=0","bsh","bf16","mixed-dtypes","two-groups","reordered","extra-outputs","overlap","branch'
    'es=2","all-reduce","all-to-all","binary","fused-reduce","index","marker","matmul","norm","operator",'
    '"reduce-scatter","transpose","unary","view","timed"],"streams":{"compute":[0],"comm":[1],"sync_overh'
    'ead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
