"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   c: [1, 2] = input
#   rms_norm: [1, 2] = rms_norm(c, gain, 1e-06)
#   mul: [1, 2] = mul.Tensor(rms_norm, c)
#   return (rms_norm, mul)

PASS = 'tests.mutants.foreign_local:WrittenWhileRead'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0],['
    '1]]}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unif'
    'orm","scale":1.0}},{"name":"c","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uni'
    'form","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"va'
    'l":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"c","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"rms_norm","op'
    '":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"c"},{"node":"gain"},1e-06],"val"'
    ':{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"mul","op":"call_function","tar'
    'get":"aten::mul.Tensor","args":[{"node":"rms_norm"},{"node":"c"}],"val":{"shape":[1,2],"stride":[2,1'
    '],"dtype":"float32","alias":3}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node"'
    ':"rms_norm"},{"node":"mul"}]}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"'
    'seed":0,"labels":["layers=0","bsh","bf16","mixed-dtypes","two-groups","reordered","extra-outputs","w'
    'ild","all-gather","all-reduce","binary","cast","constant","filled","fused-norm","in-place","matmul",'
    '"norm","reduce-scatter","unary"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
