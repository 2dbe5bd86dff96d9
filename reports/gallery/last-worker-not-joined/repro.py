"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x0: [1, 1] = input
#   reduce: [1] = reduce(x0, sum over dim 0, [0] replicated -> [0] replicated)
#   return (reduce)

PASS = 'tests.mutants.resharding_streams:LastWorkerNotJoined'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
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
    '1]]}]},"inputs":[{"name":"x0","shape":[1,1],"dtype":"float32","placements":[],"recipe":{"kind":"unif'
    'orm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x0","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":0},"meta":{"layout":"[0] replicated"}},{"nam'
    'e":"reduce","op":"call_function","target":"multidevice::reduce","args":[{"node":"x0"},0,"sum","[0] r'
    'eplicated","[0] replicated",[1,1],{"dtype":"float32"},0],"val":{"shape":[1],"stride":[1],"dtype":"fl'
    'oat32","alias":1},"meta":{"stream_axis":0}},{"name":"output","op":"output","target":"","args":[{"tup'
    'le":[{"node":"reduce"}]}]}]},{"nodes":[{"name":"output","op":"output","target":"","args":[{"tuple":['
    ']}]}]}],"ranks":[{"graph":0,"constants":{"rank":0}},{"graph":1,"constants":{"rank":1}}],"seed":0,"la'
    'bels":["resharding","scattered","bfloat16","allgather"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
