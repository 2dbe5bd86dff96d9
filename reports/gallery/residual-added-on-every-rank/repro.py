"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   partial: [1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(partial, 0, [0, 1])
#   add: [1, 2] = add.Tensor(all_reduce, v)
#   return add

PASS = 'tests.mutants.foreign:SunkBelowResidual'
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
    ']}]},"inputs":[{"name":"partial","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]'
    '],"recipe":{"kind":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":'
    '[],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"partial","op":"placeholder'
    '","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v'
    '","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","al'
    'ias":1}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node'
    '":"partial"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"d'
    'type":"float32","alias":2}},{"name":"add","op":"call_function","target":"aten::add.Tensor","args":[{'
    '"node":"all_reduce"},{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}}'
    ',{"name":"output","op":"output","target":"","args":[{"node":"add"}]}]}],"ranks":[{"graph":0,"constan'
    'ts":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers'
    '=1","flat","bf16","two-groups","reordered","extra-outputs","carried-residual","fused-residual","over'
    '-dp","over-tp","region","rms_norm","transpose","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
