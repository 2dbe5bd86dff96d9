"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0])
#   all_reduce_1: [1, 2] = all_reduce(v, 0, [0, 1])
#   return (all_reduce, all_reduce_1)

PASS = 'tests.mutants.foreign_groups:BucketOfAllGroups'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[["dp","partial(sum)"]],"re'
    'cipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"plac'
    'eholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"n'
    'ame":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"ran'
    'k_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","a'
    'lias":2}},{"name":"all_reduce_1","op":"call_function","target":"tensor_cast::all_reduce","args":[{"n'
    'ode":"v"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtyp'
    'e":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"all_r'
    'educe"},{"node":"all_reduce_1"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1],"tp":[0]'
    '}},{"graph":0,"constants":{"rank":1,"dp":[0,1],"tp":[1]}}],"seed":0,"labels":["layers=1","bsh","bf16'
    '","two-groups","extra-outputs","bias","fused-residual","over-dp","over-tp","rms_norm","timed","rank-'
    'dependent-costs"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
