"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   row: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 1])
#   return all_reduce

PASS = 'tests.mutants.foreign_groups:CollectiveErased'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'deadlock'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"rec'
    'ipe":{"kind":"uniform","scale":1.0}},{"name":"row","shape":[1,2],"dtype":"float32","placements":[],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"row","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},0'
    ',[0,1]],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"out'
    'put","target":"","args":[{"node":"all_reduce"}]}]},{"nodes":[{"name":"x","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"row","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},1'
    ',[0,1]],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"out'
    'put","target":"","args":[{"node":"row"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":1,"constan'
    'ts":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
