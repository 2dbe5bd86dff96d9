"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x10: [1, 1] = input
#   linear: [1, 1] = linear(x10, x10)
#   return (linear)

PASS = 'tests.mutants.resharding_streams:NoInitialSync'
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
    '1]]}]},"inputs":[{"name":"x10","shape":[1,1],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"x10","op":"placeholder","target":"","args":[],"val'
    '":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":0},"meta":{"layout":"[0] replicated"}},{"n'
    'ame":"linear","op":"call_function","target":"aten::linear","args":[{"node":"x10"},{"node":"x10"}],"v'
    'al":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1},"meta":{"layout":"[0] replicated","st'
    'ream_axis":0}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"linear"}]}]}]},'
    '{"nodes":[{"name":"output","op":"output","target":"","args":[{"tuple":[]}]}]}],"ranks":[{"graph":0,"'
    'constants":{"rank":0}},{"graph":1,"constants":{"rank":1}}],"seed":0,"labels":["resharding","pipeline'
    'd","float32","strided"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
