"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   bias: [2] = input
#   residual: [1, 2] = input
#   add: [1, 2] = add.Tensor(residual, bias)
#   return add

PASS = 'tests.mutants.foreign_local:InputOverwritten'
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
    ']}]},"inputs":[{"name":"bias","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"residual","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind"'
    ':"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"bias","op":"placeholder","target":"","args":['
    '],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"residual","op":"placeholder'
    '","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"a'
    'dd","op":"call_function","target":"aten::add.Tensor","args":[{"node":"residual"},{"node":"bias"}],"v'
    'al":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","targ'
    'et":"","args":[{"node":"add"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"'
    'seed":0,"labels":["layers=1","bsh","two-groups","reordered","extra-outputs","near-miss","bias","entr'
    'y-norm","foreign-residual","mlp","over-dp","region","rms_norm"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
