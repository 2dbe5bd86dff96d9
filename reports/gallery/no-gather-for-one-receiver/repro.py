"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x0: [1] = input
#   set_1: [2] = set(x0, [0, 1] shard(0) -> [1, 0] replicated)
#   return (set_1)

PASS = 'tests.mutants.resharding:NoGatherForTheLastReceiver'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"m0","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x0","shape":[2],"dtype":"float32","placements":[["m0","shard(0)"]],"recipe":'
    '{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x0","op":"placeholder","target":"","ar'
    'gs":[],"val":{"shape":[1],"stride":[1],"dtype":"float32","alias":0},"meta":{"layout":"[0, 1] shard(0'
    ')"}},{"name":"set_1","op":"call_function","target":"multidevice::set","args":[{"node":"x0"},"[0, 1] '
    'shard(0)","[1, 0] replicated",[2],{"dtype":"float32"},{"rank_constant":"rank"}],"val":{"shape":[2],"'
    'stride":[1],"dtype":"float32","alias":1}},{"name":"output","op":"output","target":"","args":[{"tuple'
    '":[{"node":"set_1"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0}},{"graph":0,"constants":{"rank'
    '":1}}],"seed":0,"labels":["resharding","any","int64","reduce","scatter","gather"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
