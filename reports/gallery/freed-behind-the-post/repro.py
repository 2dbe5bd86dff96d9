"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x0: [1] = input
#   neg: [1] = neg(x0)
#   set_1: [0] = set(neg, [0] replicated -> [1] replicated)
#   return ()

PASS = 'tests.mutants.resharding_memory:FreedAtThePost'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'lowered': True,
    'deallocation': True,
    'streams': 3,
    'inputs': 'stream0',
}
KIND = 'async-race'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"m0","groups":[[0],['
    '1]]}]},"inputs":[{"name":"x0","shape":[1],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x0","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1],"stride":[1],"dtype":"float32","alias":0},"meta":{"layout":"[0] replicated"}},{"name":"ne'
    'g","op":"call_function","target":"aten::neg","args":[{"node":"x0"}],"val":{"shape":[1],"stride":[1],'
    '"dtype":"float32","alias":1},"meta":{"layout":"[0] replicated"}},{"name":"set_1","op":"call_function'
    '","target":"multidevice::set","args":[{"node":"neg"},"[0] replicated","[1] replicated",[1],{"dtype":'
    '"float32"},0],"val":{"shape":[0],"stride":[1],"dtype":"float32","alias":2}},{"name":"output","op":"o'
    'utput","target":"","args":[{"tuple":[]}]}]},{"nodes":[{"name":"set_1","op":"call_function","target":'
    '"multidevice::set","args":[null,"[0] replicated","[1] replicated",[1],{"dtype":"float32"},1],"val":{'
    '"shape":[1],"stride":[1],"dtype":"float32","alias":0}},{"name":"output","op":"output","target":"","a'
    'rgs":[{"tuple":[{"node":"set_1"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0}},{"graph":1,"cons'
    'tants":{"rank":1}}],"seed":0,"labels":["resharding","chain","float32","broadcast","scatter"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
