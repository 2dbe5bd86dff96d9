"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   relu: [1, 2] = relu(v)
#   add_: [1, 2] = add_.Tensor(v, 1.0)
#   relu_1: [1, 2] = relu(v)
#   sub: [1, 2] = sub.Tensor(relu, relu_1)
#   return sub

PASS = 'tests.mutants.foreign_local:MergedAcrossWrite'
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
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"relu","op":"call_function","target"'
    ':"aten::relu","args":[{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}'
    '},{"name":"add_","op":"call_function","target":"aten::add_.Tensor","args":[{"node":"v"},1.0],"val":{'
    '"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"relu_1","op":"call_function","ta'
    'rget":"aten::relu","args":[{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alia'
    's":2}},{"name":"sub","op":"call_function","target":"aten::sub.Tensor","args":[{"node":"relu"},{"node'
    '":"relu_1"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op"'
    ':"output","target":"","args":[{"node":"sub"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"co'
    'nstants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
