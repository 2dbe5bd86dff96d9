"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   x: [1, 1, 1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(v, 1, [0, 1])
#   reduce_scatter: [1, 1, 1, 1] = reduce_scatter(x, 3, 1, [0, 1])
#   return (all_reduce, reduce_scatter)

PASS = 'tests.mutants.foreign_groups:BucketOfAllKinds'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,1,1,2],"dtype":"float32","placements":[["tp","varying"]],"reci'
    'pe":{"kind":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"rec'
    'ipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":""'
    ',"args":[],"val":{"shape":[1,1,1,2],"stride":[2,2,2,1],"dtype":"float32","alias":0}},{"name":"v","op'
    '":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":'
    '1}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"'
    '},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"floa'
    't32","alias":2}},{"name":"reduce_scatter","op":"call_function","target":"tensor_cast::reduce_scatter'
    '","args":[{"node":"x"},3,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,1,1,1],"'
    'stride":[1,1,1,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{'
    '"tuple":[{"node":"all_reduce"},{"node":"reduce_scatter"}]}]}]}],"ranks":[{"graph":0,"constants":{"ra'
    'nk":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","sbh'
    '","bf16","reordered","few-tokens","extra-outputs","wild","all-gather","all-reduce","binary","cast","'
    'fused-norm","matmul","norm","quantised","reduce-scatter","slice","split","transpose","unary"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
