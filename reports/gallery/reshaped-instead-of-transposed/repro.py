"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [2, 4, 2] = input
#   reduce_scatter: [2, 2, 2] = reduce_scatter(v, 1, 0, [0, 1])
#   return reduce_scatter

PASS = 'tests.mutants.foreign:TransposeByReshape'
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
    ']}]},"inputs":[{"name":"v","shape":[2,4,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[2,4,2],"stride":[8,2,1],"dtype":"float32","alias":0}},{"name":"reduce_scatter","op":"call_fu'
    'nction","target":"tensor_cast::reduce_scatter","args":[{"node":"v"},1,{"rank_constant":"rank"},{"ran'
    'k_constant":"tp"}],"val":{"shape":[2,2,2],"stride":[4,2,1],"dtype":"float32","alias":1}},{"name":"ou'
    'tput","op":"output","target":"","args":[{"node":"reduce_scatter"}]}]}],"ranks":[{"graph":0,"constant'
    's":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers='
    '0","flat","bf16","two-groups","extra-outputs","wild","all-gather","all-reduce","binary","filled","in'
    'dex","marker","norm","operator","quantised","reduce-scatter","view","write"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
