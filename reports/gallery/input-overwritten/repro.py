"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [1, 2] = input
#   bias: [2] = input
#   add: [1, 2] = add.Tensor(partial, bias)
#   return add

PASS = 'tests.mutants.foreign_local:InputOverwritten'
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
    ']}]},"inputs":[{"name":"partial","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"u'
    'niform","scale":1.0}},{"name":"bias","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":'
    '"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholder","target":"","args"'
    ':[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"bias","op":"placehold'
    'er","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"add'
    '","op":"call_function","target":"aten::add.Tensor","args":[{"node":"partial"},{"node":"bias"}],"val"'
    ':{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target"'
    ':"","args":[{"node":"add"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"see'
    'd":0,"labels":["layers=2","bsh","bf16","two-groups","reordered","extra-outputs","bias","fused-residu'
    'al","over-dp","over-tp","region","rms_norm","unfused-residual","view","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
