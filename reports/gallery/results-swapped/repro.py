"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   add_rms_norm2 = add_rms_norm2(v, v, gain, 1e-06)
#   getitem: [1, 2] = add_rms_norm2[1]
#   return getitem

PASS = 'tests.mutants.foreign_local:ResultsSwapped'
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
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"val"'
    ':{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"add_rms_norm2",'
    '"op":"call_function","target":"tensor_cast::add_rms_norm2","args":[{"node":"v"},{"node":"v"},{"node"'
    ':"gain"},1e-06],"val":{"tuple":[{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2},{"shape":'
    '[1,2],"stride":[2,1],"dtype":"float32","alias":3}]}},{"name":"getitem","op":"call_function","target"'
    ':"python::getitem","args":[{"node":"add_rms_norm2"},1],"val":{"shape":[1,2],"stride":[2,1],"dtype":"'
    'float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"node":"getitem"}]}]}],"ran'
    'ks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["layers=3","bsh","ext'
    'ra-outputs","attention","bias","carried-residual","entry-norm","fused-reduce","fused-residual","mask'
    '","mlp","over-tp","reduced-read-later","region","rms_norm","transpose","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
