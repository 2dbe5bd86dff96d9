"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   v_1: [1, 2] = input
#   all_reduce: [1, 2] = all_reduce(v_1, 0, [0, 1])
#   add: [1, 2] = add.Tensor(all_reduce, v)
#   return (all_reduce, add)

PASS = 'tests.mutants.foreign_local:WrittenWhileRead'
OPTIONS = {}
CONTRACT = {
    'idempotent': False,
    'metadata': True,
    'identity': False,
    'schedule': False,
    'overlap': False,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'wrong-value'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}},{"name":"v_1","shape":[1,2],"dtype":"float32","placements":[["tp","partial(sum)"]],"'
    'recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"v_1","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"v_1"}'
    ',{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float'
    '32","alias":2}},{"name":"add","op":"call_function","target":"aten::add.Tensor","args":[{"node":"all_'
    'reduce"},{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}},{"name":"ou'
    'tput","op":"output","target":"","args":[{"tuple":[{"node":"all_reduce"},{"node":"add"}]}]}]}],"ranks'
    '":[{"graph":0,"constants":{"rank":0,"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"see'
    'd":0,"labels":["layers=3","bsh","bf16","two-groups","reordered","extra-outputs","attention","bias","'
    'carried-residual","entry-norm","fused-residual","mask","mlp","over-tp","region","rms_norm","unfused-'
    'residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
