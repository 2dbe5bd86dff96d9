"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   wdown: [2, 2] = input
#   v: [1, 2] = input
#   matmul: [1, 2] = matmul(v, wdown)
#   all_reduce: [1, 2] = all_reduce(matmul, 0, [0])
#   return all_reduce

PASS = 'tests.mutants.foreign_groups:FusedOverWorld'
OPTIONS = {'world_size': 4}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":4,"dims":[{"name":"tp","groups":[[0],['
    '1,2,3]]}]},"inputs":[{"name":"wdown","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind'
    '":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kin'
    'd":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"wdown","op":"placeholder","target":"","args'
    '":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder'
    '","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"m'
    'atmul","op":"call_function","target":"aten::matmul","args":[{"node":"v"},{"node":"wdown"}],"val":{"s'
    'hape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","'
    'target":"tensor_cast::all_reduce","args":[{"node":"matmul"},{"rank_constant":"rank"},{"rank_constant'
    '":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"output","op":"ou'
    'tput","target":"","args":[{"node":"all_reduce"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":'
    '[0]}},{"graph":0,"constants":{"rank":1,"tp":[1,2,3]}},{"graph":0,"constants":{"rank":2,"tp":[1,2,3]}'
    '},{"graph":0,"constants":{"rank":3,"tp":[1,2,3]}}],"seed":0,"labels":["layers=1","bsh","bf16","uneve'
    'n","fused-residual","mlp","over-tp","region","rms_norm","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
