"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   x2: [1, 2] = input
#   w: [2, 2] = input
#   matmul: [1, 2] = matmul(x2, w)
#   all_reduce: [2, 2] = all_reduce(x, 0, [0, 1])
#   reduce_scatter: [1, 2] = reduce_scatter(all_reduce, 0, 0, [0, 1])
#   return (matmul, reduce_scatter)

PASS = 'tcverify.passes.sequence_parallel:SequenceParallel+tests.mutants.multistream:TokenSharedByCollectives'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
    'schedule': True,
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"x2","shape":[1,2],"dtype":"float32","placements":[],"r'
    'ecipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":[2,2],"dtype":"float32","placements":[],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"x2","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},'
    '{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"fl'
    'oat32","alias":2}},{"name":"matmul","op":"call_function","target":"aten::matmul","args":[{"node":"x2'
    '"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1'
    'e-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":'
    '"x"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":4},"meta":{"cost_s":1e-06}},{"name":"reduce_scatter","op":"call_function","target":"'
    'tensor_cast::reduce_scatter","args":[{"node":"all_reduce"},0,{"rank_constant":"rank"},{"rank_constan'
    't":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5},"meta":{"cost_s":1e-06}},'
    '{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"matmul"},{"node":"reduce_scatt'
    'er"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1],"tp":[0,1]}},{"graph":0,"constants"'
    ':{"rank":1,"dp":[0,1],"tp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups","reordered","ex'
    'tra-outputs","overlap","branches=2","all-reduce","all-to-all","fused-reduce","in-place","marker","ma'
    'tmul","norm","quantised","reduce-scatter","split","unary","timed"],"streams":{"compute":[0],"comm":['
    '1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
