"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   clone: [1, 2] = clone(x, memory_format=contiguous_format)
#   return (all_reduce, clone)

PASS = 'tests.mutants.multistream:RecordedWhereNeeded'
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
KIND = 'anchor-mismatch'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_reduce","op":"call_function","t'
    'arget":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"dp"'
    '}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1},"meta":{"cost_s":1e-06}},{"name"'
    ':"clone","op":"call_function","target":"aten::clone","args":[{"node":"x"}],"kwargs":{"memory_format"'
    ':{"memory_format":"contiguous_format"}},"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias'
    '":2},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"'
    'all_reduce"},{"node":"clone"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"dp":[0,1]}},{"graph"'
    ':0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups","reordered",'
    '"extra-outputs","overlap","branches=2","all-gather","all-reduce","binary","fused-reduce","index","ma'
    'rker","matmul","norm","reduce-scatter","transpose","unary","write","timed"],"streams":{"compute":[0]'
    ',"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
