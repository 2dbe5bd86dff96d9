"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(partial, 0, [0, 1])
#   return all_reduce

PASS = 'tests.mutants.foreign:ContributionTwice'
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
    ']}]},"inputs":[{"name":"partial","shape":[1,2],"dtype":"float32","placements":[["dp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholder"'
    ',"target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"al'
    'l_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"partial"},{"rank_'
    'constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","ali'
    'as":1}},{"name":"output","op":"output","target":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"gra'
    'ph":0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"la'
    'bels":["layers=1","bsh","bf16","mixed-dtypes","two-groups","reordered","fused-residual","over-dp","r'
    'egion","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
