"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   reduce_scatter: [1, 1] = reduce_scatter(v, 1, 0, [0, 1])
#   clone: [1, 2] = clone(v, memory_format=contiguous_format)
#   return (reduce_scatter, clone)

PASS = 'tests.mutants.multistream:WaitNamesMainStream'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'identity': False,
    'schedule': True,
    'overlap': True,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'stream-conflict'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"reduce_scatter","op":"call_function'
    '","target":"tensor_cast::reduce_scatter","args":[{"node":"v"},1,{"rank_constant":"rank"},{"rank_cons'
    'tant":"tp"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1},"meta":{"cost_s":1e-06'
    '}},{"name":"clone","op":"call_function","target":"aten::clone","args":[{"node":"v"}],"kwargs":{"memo'
    'ry_format":{"memory_format":"contiguous_format"}},"val":{"shape":[1,2],"stride":[2,1],"dtype":"float'
    '32","alias":2},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":'
    '[{"node":"reduce_scatter"},{"node":"clone"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0'
    ',1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups'
    '","reordered","extra-outputs","overlap","branches=2","all-gather","all-reduce","binary","fused-reduc'
    'e","index","marker","matmul","norm","reduce-scatter","transpose","unary","write","timed"],"streams":'
    '{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
