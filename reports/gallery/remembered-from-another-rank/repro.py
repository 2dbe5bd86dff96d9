"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   v: [1, 2] = input
#   reduce_scatter: [1, 1] = reduce_scatter(v, 1, 1, [0, 1])
#   return reduce_scatter

PASS = 'tests.mutants.foreign:RememberedFromFirstRank'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"reduce_scatter","op":"call_function'
    '","target":"tensor_cast::reduce_scatter","args":[{"node":"v"},1,{"rank_constant":"rank"},{"rank_cons'
    'tant":"tp"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1}},{"name":"output","op"'
    ':"output","target":"","args":[{"node":"reduce_scatter"}]}]}],"ranks":[{"graph":0,"constants":{"rank"'
    ':0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","flat",'
    '"two-groups","reordered","wild","all-reduce","marker","norm","operator","reduce-scatter","split","tr'
    'anspose","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
