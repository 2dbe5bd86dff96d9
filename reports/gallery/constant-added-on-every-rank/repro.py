"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   add: [1, 2] = add.Tensor(all_reduce, 1.0)
#   return add

PASS = 'tests.mutants.foreign:SunkBelowConstant'
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
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":""'
    ',"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"all_reduce","o'
    'p":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank"},'
    '{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"a'
    'dd","op":"call_function","target":"aten::add.Tensor","args":[{"node":"all_reduce"},1.0],"val":{"shap'
    'e":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","ar'
    'gs":[{"node":"add"}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constant'
    's":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
