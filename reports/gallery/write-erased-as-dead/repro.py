"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   add_: [1, 2] = add_.Tensor(x, x)
#   return x

PASS = 'tests.mutants.foreign_groups:WriteErased'
OPTIONS = {}
CONTRACT = {}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"add_","op":"call_function","target"'
    ':"aten::add_.Tensor","args":[{"node":"x"},{"node":"x"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":'
    '"float32","alias":0}},{"name":"output","op":"output","target":"","args":[{"node":"x"}]}]}],"ranks":['
    '{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["layers=0","bsh","extra-ou'
    'tputs","overlap","branches=3","all-gather","all-reduce","filled","fused-norm","index","marker","matm'
    'ul","norm","operator","reduce-scatter","unary","view","write","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
