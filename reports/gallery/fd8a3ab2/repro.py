"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   x4: [1, 2] = input
#   w: [2, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   matmul: [1, 2] = matmul(all_reduce, w)
#   matmul_1: [1, 2] = matmul(x4, w)
#   return (matmul, matmul_1)

PASS = 'tests.mutants.multistream:OldMakespanDeclared'
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
KIND = 'wrong-schedule'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"x4","shape":[1,2],"dtype":"float32","placements":[],"r'
    'ecipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"x4","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},'
    '{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"fl'
    'oat32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","arg'
    's":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1'
    '],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","targe'
    't":"aten::matmul","args":[{"node":"all_reduce"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"d'
    'type":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"matmul_1","op":"call_function","target"'
    ':"aten::matmul","args":[{"node":"x4"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"flo'
    'at32","alias":5},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"","args":[{"tuple'
    '":[{"node":"matmul"},{"node":"matmul_1"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]'
    '}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups","'
    'reordered","extra-outputs","overlap","branches=4","all-gather","all-reduce","binary","fused-norm","f'
    'used-reduce","marker","matmul","reduce-scatter","split","write","timed"],"streams":{"compute":[0],"c'
    'omm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
