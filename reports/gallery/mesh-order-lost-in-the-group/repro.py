"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x1: [1, 2] = input
#   reduce: [1] = reduce(x1, sum over dim 0, [1, 0] shard(0) -> [1, 0] shard(0))
#   return (reduce)

PASS = 'tests.mutants.resharding:TeamSorted'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'lowered': True,
    'deallocation': True,
    'streams': 3,
    'inputs': 'stream0',
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"m0","groups":[[1,0]'
    ']}]},"inputs":[{"name":"x1","shape":[2,2],"dtype":"float32","placements":[["m0","shard(0)"]],"recipe'
    '":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x1","op":"placeholder","target":"","'
    'args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0},"meta":{"layout":"[1, 0] s'
    'hard(0)"}},{"name":"reduce","op":"call_function","target":"multidevice::reduce","args":[{"node":"x1"'
    '},0,"sum","[1, 0] shard(0)","[1, 0] shard(0)",[2,2],{"dtype":"float32"},{"rank_constant":"rank"}],"v'
    'al":{"shape":[1],"stride":[1],"dtype":"float32","alias":1}},{"name":"output","op":"output","target":'
    '"","args":[{"tuple":[{"node":"reduce"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0}},{"graph":0'
    ',"constants":{"rank":1}}],"seed":0,"labels":["resharding","any","float64","broadcast","send-recv","r'
    'educe-scatter","in-place","grid-chunk"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
