"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   rms_norm: [1, 2] = rms_norm(v, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.foreign_local:NumberedByProcess'
OPTIONS = {}
CONTRACT = {}
KIND = 'impure-pass'
DOMAIN = 'float64'
DEEP = True
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"val"'
    ':{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"rms_norm","op":'
    '"call_function","target":"tensor_cast::rms_norm","args":[{"node":"v"},{"node":"gain"},1e-06],"val":{'
    '"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"'
    '","args":[{"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"'
    'seed":0,"labels":["layers=1","flat","bf16","mixed-dtypes","two-groups","reordered","extra-outputs","'
    'cast","entry-norm","fused-residual","mlp","over-dp","over-tp","region","rms_norm","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
