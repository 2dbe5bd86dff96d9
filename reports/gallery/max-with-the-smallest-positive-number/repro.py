"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 1 runs it:
#
#   reduce: [] = reduce(None, max over dim 0, [0] replicated -> [1] replicated)
#   return (reduce)

PASS = 'tests.mutants.resharding:SmallestPositiveIsTheIdentity'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"m0","groups":[[0],['
    '1]]}]},"inputs":[{"name":"x3","shape":[1],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x3","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1],"stride":[1],"dtype":"float32","alias":0},"meta":{"layout":"[0] replicated"}},{"name":"re'
    'duce","op":"call_function","target":"multidevice::reduce","args":[{"node":"x3"},0,"max","[0] replica'
    'ted","[1] replicated",[1],{"dtype":"float32"},0],"val":{"shape":[0],"stride":[1],"dtype":"float32","'
    'alias":1}},{"name":"output","op":"output","target":"","args":[{"tuple":[]}]}]},{"nodes":[{"name":"re'
    'duce","op":"call_function","target":"multidevice::reduce","args":[null,0,"max","[0] replicated","[1]'
    ' replicated",[1],{"dtype":"float32"},1],"val":{"shape":[],"stride":[],"dtype":"float32","alias":0}},'
    '{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"reduce"}]}]}]}],"ranks":[{"gra'
    'ph":0,"constants":{"rank":0}},{"graph":1,"constants":{"rank":1}}],"seed":0,"labels":["resharding","s'
    'cattered","float32","reduce","send-recv","strided"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
