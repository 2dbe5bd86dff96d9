"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   v: [2, 4] = input
#   reduce_scatter: [2, 2] = reduce_scatter(v, 1, 1, [0, 1])
#   return reduce_scatter

PASS = 'tests.mutants.foreign:TransposeByReshape'
OPTIONS = {}
CONTRACT = {
    'idempotent': False,
    'metadata': True,
    'identity': False,
    'schedule': False,
    'overlap': False,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[2,4],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[2,4],"stride":[4,1],"dtype":"float32","alias":0}},{"name":"reduce_scatter","op":"call_function'
    '","target":"tensor_cast::reduce_scatter","args":[{"node":"v"},1,{"rank_constant":"rank"},{"rank_cons'
    'tant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"output","op"'
    ':"output","target":"","args":[{"node":"reduce_scatter"}]}]}],"ranks":[{"graph":0,"constants":{"rank"'
    ':0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","'
    'two-groups","reordered","extra-outputs","wild","all-reduce","fused-norm","matmul","reduce-scatter","'
    'slice","softmax","transpose","unary","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
