"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   v: [1, 2] = input
#   add_: [1, 2] = add_.Tensor(x, x)
#   all_gather: [2, 2] = all_gather(v, 0, 0, [0, 1])
#   return all_gather

PASS = 'tests.mutants.multistream:WrittenOperandGated'
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
KIND = 'wrong-value'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"add_","op":"cal'
    'l_function","target":"aten::add_.Tensor","args":[{"node":"x"},{"node":"x"}],"val":{"shape":[1,2],"st'
    'ride":[2,1],"dtype":"float32","alias":0},"meta":{"cost_s":1e-06}},{"name":"all_gather","op":"call_fu'
    'nction","target":"tensor_cast::all_gather","args":[{"node":"v"},0,{"rank_constant":"rank"},{"rank_co'
    'nstant":"dp"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"cost_s":1e-'
    '06}},{"name":"output","op":"output","target":"","args":[{"node":"all_gather"}]}]}],"ranks":[{"graph"'
    ':0,"constants":{"rank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"label'
    's":["layers=0","bsh","two-groups","reordered","extra-outputs","overlap","branches=3","all-gather","c'
    'at","filled","fused-norm","in-place","index","marker","matmul","norm","reduce-scatter","slice","spli'
    't","unary","write","timed"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}'
    '}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
