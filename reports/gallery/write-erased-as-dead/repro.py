"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   mul_: [1, 2] = mul_.Tensor(v, 2.0)
#   return v

PASS = 'tests.mutants.foreign_groups:WriteErased'
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
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"mul_","op":"call_function","target"'
    ':"aten::mul_.Tensor","args":[{"node":"v"},2.0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32"'
    ',"alias":0}},{"name":"output","op":"output","target":"","args":[{"node":"v"}]}]}],"ranks":[{"graph":'
    '0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["functional","tensor-parallel","aft'
    'er","coalesced","column-row","write","write-before","write-behind","timed","rank-dependent-costs"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
