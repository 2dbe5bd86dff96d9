"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   x: [2, 1] = input
#   reduce_scatter: [1, 1] = reduce_scatter(x, 0, 1, [0, 1])
#   return reduce_scatter

PASS = 'tests.mutants.foreign:RememberedFromFirstRank'
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
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[["tp","shard(1)"]],"recipe"'
    ':{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","ar'
    'gs":[],"val":{"shape":[2,1],"stride":[1,1],"dtype":"float32","alias":0}},{"name":"reduce_scatter","o'
    'p":"call_function","target":"tensor_cast::reduce_scatter","args":[{"node":"x"},0,{"rank_constant":"r'
    'ank"},{"rank_constant":"tp"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1}},{"na'
    'me":"output","op":"output","target":"","args":[{"node":"reduce_scatter"}]}]}],"ranks":[{"graph":0,"c'
    'onstants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["'
    'layers=0","rank-reduced","two-groups","reordered","extra-outputs","wild","binary","constant","filled'
    '","fused-norm","fused-reduce","norm","quantised","reduce-scatter","unary","view","write"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
