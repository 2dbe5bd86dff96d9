"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   add: [1, 2] = add.Tensor(v, v)
#   rms_norm: [1, 2] = rms_norm(add, gain, 0.001)
#   return rms_norm

PASS = 'tests.mutants.foreign_local:DefaultEps'
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
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"add","op":"call'
    '_function","target":"aten::add.Tensor","args":[{"node":"v"},{"node":"v"}],"val":{"shape":[1,2],"stri'
    'de":[2,1],"dtype":"float32","alias":2}},{"name":"rms_norm","op":"call_function","target":"tensor_cas'
    't::rms_norm","args":[{"node":"add"},{"node":"gain"},0.001],"val":{"shape":[1,2],"stride":[2,1],"dtyp'
    'e":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"node":"rms_norm"}]}]}]'
    ',"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":["layers=2","sbh"'
    ',"reordered","extra-outputs","attention","bias","carried-residual","fused-residual","mask","mlp","ov'
    'er-tp","reduced-read-later","region","rms_norm","transpose","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
