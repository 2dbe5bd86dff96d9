"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   v: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(v, 0, [0, 1])
#   add: [1, 2] = add(x, 1.0)
#   add_: [1, 2] = add_.Tensor(v, 1.0)
#   return (all_reduce, add)

PASS = 'tests.mutants.multistream:WriteAfterReadUntracked'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'identity': False,
    'schedule': True,
    'overlap': True,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'race'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"re'
    'cipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v","op":"plac'
    'eholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"n'
    'ame":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v"},{"ran'
    'k_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","a'
    'lias":2},"meta":{"cost_s":1e-06}},{"name":"add","op":"call_function","target":"python::add","args":['
    '{"node":"x"},1.0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":'
    '1e-06}},{"name":"add_","op":"call_function","target":"aten::add_.Tensor","args":[{"node":"v"},1.0],"'
    'val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1},"meta":{"cost_s":1e-06}},{"name":"ou'
    'tput","op":"output","target":"","args":[{"tuple":[{"node":"all_reduce"},{"node":"add"}]}]}]}],"ranks'
    '":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"see'
    'd":0,"labels":["layers=0","sbh","bf16","extra-outputs","overlap","branches=2","all-gather","all-redu'
    'ce","fused-norm","in-place","index","marker","matmul","operator","transpose","timed"],"streams":{"co'
    'mpute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
