"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   gain: [2] = input
#   add_rms_norm2 = add_rms_norm2(x, x, gain, 0.001)
#   getitem: [1, 2] = add_rms_norm2[0]
#   return getitem

PASS = 'tests.mutants.foreign_local:DefaultEps'
OPTIONS = {}
CONTRACT = {
    'idempotent': False,
    'metadata': True,
    'identity': False,
    'schedule': False,
    'overlap': False,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"add_rms_norm2",'
    '"op":"call_function","target":"tensor_cast::add_rms_norm2","args":[{"node":"x"},{"node":"x"},{"node"'
    ':"gain"},0.001],"val":{"tuple":[{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2},{"shape":'
    '[1,2],"stride":[2,1],"dtype":"float32","alias":3}]}},{"name":"getitem","op":"call_function","target"'
    ':"python::getitem","args":[{"node":"add_rms_norm2"},0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"'
    'float32","alias":2}},{"name":"output","op":"output","target":"","args":[{"node":"getitem"}]}]}],"ran'
    'ks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["layers=1","flat","bf'
    '16","reordered","extra-outputs","bias","carried-residual","fused-residual","mlp","over-tp"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
