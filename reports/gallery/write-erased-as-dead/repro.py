"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   v: [1, 2] = input
#   v_1: [2, 2] = input
#   copy_: [2, 2] = copy_(x, v_1)
#   return v

PASS = 'tests.mutants.foreign:WriteErased'
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
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v_1","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"unif'
    'orm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":'
    '"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"v_1","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2}},'
    '{"name":"copy_","op":"call_function","target":"aten::copy_","args":[{"node":"x"},{"node":"v_1"}],"va'
    'l":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"output","op":"output","targe'
    't":"","args":[{"node":"v"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"see'
    'd":0,"labels":["layers=0","bsh","extra-outputs","overlap","branches=3","all-gather","all-reduce","bi'
    'nary","cat","fused-norm","fused-reduce","marker","norm","write","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
