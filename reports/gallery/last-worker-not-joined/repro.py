"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x5: [1, 1, 1] = input
#   x6: [1, 1] = input
#   matmul: [1, 1, 1] = matmul(x5, x6)
#   return (matmul)

PASS = 'tests.mutants.resharding_streams:LastWorkerNotJoined'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'lowered': True,
    'deallocation': True,
    'streams': 3,
    'inputs': 'stream0',
}
KIND = 'race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"m0","groups":[[0],['
    '1]]}]},"inputs":[{"name":"x5","shape":[1,1,1],"dtype":"float32","placements":[],"recipe":{"kind":"un'
    'iform","scale":1.0}},{"name":"x6","shape":[1,1],"dtype":"float32","placements":[],"recipe":{"kind":"'
    'uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x5","op":"placeholder","target":"","args":[],"v'
    'al":{"shape":[1,1,1],"stride":[1,1,1],"dtype":"float32","alias":0},"meta":{"layout":"[0] replicated"'
    '}},{"name":"x6","op":"placeholder","target":"","args":[],"val":{"shape":[1,1],"stride":[1,1],"dtype"'
    ':"float32","alias":1},"meta":{"layout":"[0] replicated"}},{"name":"matmul","op":"call_function","tar'
    'get":"aten::matmul","args":[{"node":"x5"},{"node":"x6"}],"val":{"shape":[1,1,1],"stride":[1,1,1],"dt'
    'ype":"float32","alias":2},"meta":{"layout":"[0] replicated","stream_axis":2}},{"name":"output","op":'
    '"output","target":"","args":[{"tuple":[{"node":"matmul"}]}]}]},{"nodes":[{"name":"output","op":"outp'
    'ut","target":"","args":[{"tuple":[]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0}},{"graph":1,"co'
    'nstants":{"rank":1}}],"seed":0,"labels":["resharding","streams","bfloat16","strided"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
