"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   gain: [2] = input
#   layer_norm: [1, 2] = layer_norm(x, gain, None, 1e-06)
#   return layer_norm

PASS = 'tests.mutants.foreign_local:VarianceOfSample'
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
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"'
    'shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"gain","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":1}},{"name":"layer_norm","op'
    '":"call_function","target":"tensor_cast::layer_norm","args":[{"node":"x"},{"node":"gain"},null,1e-06'
    '],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","'
    'target":"","args":[{"node":"layer_norm"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"consta'
    'nts":{}}],"seed":0,"labels":["layers=0","rank-reduced","extra-outputs","wild","all-reduce","binary",'
    '"filled","fused-norm","in-place","norm","operator","slice","transpose","unary","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
