"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   half: [1, 2] = input
#   x: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(half, 0, [0, 1])
#   all_reduce_1: [1, 2] = all_reduce(x, 0, [0, 1])
#   return (all_reduce, all_reduce_1)

PASS = 'tests.mutants.foreign_groups:BucketOfAllDtypes'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'native'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"half","shape":[1,2],"dtype":"bfloat16","placements":[["tp","partial(sum)"]],'
    '"recipe":{"kind":"uniform","scale":1.0}},{"name":"x","shape":[1,2],"dtype":"float32","placements":[['
    '"tp","partial(sum)"]],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"half","'
    'op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"bfloat16","alia'
    's":0}},{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dty'
    'pe":"float32","alias":1}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduc'
    'e","args":[{"node":"half"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"st'
    'ride":[2,1],"dtype":"bfloat16","alias":2}},{"name":"all_reduce_1","op":"call_function","target":"ten'
    'sor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":""'
    ',"args":[{"tuple":[{"node":"all_reduce"},{"node":"all_reduce_1"}]}]}]}],"ranks":[{"graph":0,"constan'
    'ts":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
