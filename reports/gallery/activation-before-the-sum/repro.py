"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 1] = input
#   all_reduce: [1, 1] = all_reduce(v, 0, [0, 1])
#   relu: [1, 1] = relu(all_reduce)
#   return relu

PASS = 'tests.mutants.foreign:SunkBelowActivation'
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
    ']}]},"inputs":[{"name":"v","shape":[1,1],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":""'
    ',"args":[],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":0}},{"name":"all_reduce","o'
    'p":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"rank_constant":"rank"},'
    '{"rank_constant":"tp"}],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1}},{"name":"r'
    'elu","op":"call_function","target":"aten::relu","args":[{"node":"all_reduce"}],"val":{"shape":[1,1],'
    '"stride":[1,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args":[{"no'
    'de":"relu"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"ran'
    'k":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","bsh","two-groups","reordered","few-tokens","extra-'
    'outputs","wild","all-gather","all-reduce","fused-reduce","matmul","norm","operator","slice","transpo'
    'se","unary","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
