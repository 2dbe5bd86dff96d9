"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   row: [1, 2] = input
#   gain: [2] = input
#   add: [1, 2] = add.Tensor(row, row, alpha=2.0)
#   rms_norm: [1, 2] = rms_norm(add, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.foreign_local:AlphaDropped'
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
    ']}]},"inputs":[{"name":"row","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"row","op":"placeholder","target":"","args":[],"val'
    '":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"placeholder","tar'
    'get":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"add","op":"'
    'call_function","target":"aten::add.Tensor","args":[{"node":"row"},{"node":"row"}],"kwargs":{"alpha":'
    '2.0},"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"rms_norm","op":"call'
    '_function","target":"tensor_cast::rms_norm","args":[{"node":"add"},{"node":"gain"},1e-06],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","'
    'args":[{"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"see'
    'd":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
