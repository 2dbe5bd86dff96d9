"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   x_1: [1, 2] = input
#   w: [2, 1] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   cat: [2, 2] = cat([x_1, x_1], 0)
#   split = split.Tensor(all_reduce, 3, 0)
#   getitem: [1, 2] = split[0]
#   matmul: [1, 1] = matmul(getitem, w)
#   return (cat, matmul)

PASS = 'tests.mutants.multistream:TupleDependencyUntracked'
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
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"x_1","shape":[1,2],"dtype":"float32","placements":[],"'
    'recipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,1],"dtype":"float32","placements":[],'
    '"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target'
    '":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"x_1","op":'
    '"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}'
    '},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,1],"stride":[1,1],"dtype":"'
    'float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","a'
    'rgs":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2'
    ',1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"cat","op":"call_function","target'
    '":"tensor_cast::cat","args":[[{"node":"x_1"},{"node":"x_1"}],0],"val":{"shape":[2,2],"stride":[2,1],'
    '"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"split","op":"call_function","target":'
    '"aten::split.Tensor","args":[{"node":"all_reduce"},3,0],"val":{"list":[{"shape":[1,2],"stride":[2,1]'
    ',"dtype":"float32","alias":3}]},"meta":{"cost_s":1e-06}},{"name":"getitem","op":"call_function","tar'
    'get":"python::getitem","args":[{"node":"split"},0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"floa'
    't32","alias":3},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmu'
    'l","args":[{"node":"getitem"},{"node":"w"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","a'
    'lias":5},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"nod'
    'e":"cat"},{"node":"matmul"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0'
    ',"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","rank-reduced","two-groups","reor'
    'dered","extra-outputs","overlap","branches=2","all-reduce","cat","fused-norm","fused-reduce","in-pla'
    'ce","index","matmul","norm","split","timed"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0'
    '.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
