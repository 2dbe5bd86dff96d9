"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   gain: [2] = input
#   add: [1, 2] = add.Tensor(x, x, alpha=2.0)
#   rms_norm: [1, 2] = rms_norm(add, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.foreign_local:AlphaDropped'
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
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"add","op":"call'
    '_function","target":"aten::add.Tensor","args":[{"node":"x"},{"node":"x"}],"kwargs":{"alpha":2.0},"va'
    'l":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"rms_norm","op":"call_functio'
    'n","target":"tensor_cast::rms_norm","args":[{"node":"add"},{"node":"gain"},1e-06],"val":{"shape":[1,'
    '2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{'
    '"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"la'
    'bels":["layers=1","bsh","two-groups","near-miss","alpha","bias","mlp","over-tp","reduced-read-later"'
    ',"region","rewritten","rms_norm","unfused-residual"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
