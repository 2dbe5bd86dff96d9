"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(v, 0, [0, 1])
#   silu: [1, 2] = silu(all_reduce)
#   return silu

PASS = 'tests.mutants.foreign:SunkBelowActivation'
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
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_reduce","op":"call_function","t'
    'arget":"tensor_cast::all_reduce","args":[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"dp"'
    '}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"silu","op":"call_funct'
    'ion","target":"tensor_cast::silu","args":[{"node":"all_reduce"}],"val":{"shape":[1,2],"stride":[2,1]'
    ',"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args":[{"node":"silu"}]}]'
    '}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1'
    ']}}],"seed":0,"labels":["layers=0","bsh","two-groups","reordered","few-tokens","extra-outputs","wild'
    '","all-reduce","constant","filled","fused-norm","fused-reduce","marker","matmul","norm","operator","'
    'reduce-scatter","reduction","unary","write"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
