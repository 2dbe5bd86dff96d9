"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   row: [1, 3] = input
#   mean: [1, 1] = mean.dim(row, [-1], True)
#   return mean

PASS = 'tests.mutants.tiny:ReciprocalOfFifteenDigits'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'exact'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"row","shape":[1,3],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"row","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[1,3],"stride":[3,1],"dtype":"float32","alias":0}},{"name":"mean","op":"call_function","tar'
    'get":"aten::mean.dim","args":[{"node":"row"},[-1],true],"val":{"shape":[1,1],"stride":[1,1],"dtype":'
    '"float32","alias":1}},{"name":"output","op":"output","target":"","args":[{"node":"mean"}]}]}],"ranks'
    '":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
