"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   residual: [2, 2] = input
#   gain: [2] = input
#   v: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v, 0, [0])
#   all_reduce_1: [2, 2] = all_reduce(all_reduce, 0, [0, 1])
#   add_rms_norm: [2, 2] = add_rms_norm(all_reduce_1, residual, gain, 1e-06)
#   return add_rms_norm

PASS = 'tests.mutants.sequence_parallel:GatherOverFirstGroup'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
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
    ']}]},"inputs":[{"name":"residual","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"'
    'uniform","scale":1.0}},{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind"'
    ':"uniform","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[["tp","partial(su'
    'm)"]],"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"residual","op":"placeho'
    'lder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name'
    '":"gain","op":"placeholder","target":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32",'
    '"alias":1}},{"name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1]'
    ',"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_'
    'reduce","args":[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"'
    'stride":[2,1],"dtype":"float32","alias":3}},{"name":"all_reduce_1","op":"call_function","target":"te'
    'nsor_cast::all_reduce","args":[{"node":"all_reduce"},{"rank_constant":"rank"},{"rank_constant":"tp"}'
    '],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"add_rms_norm","op":"cal'
    'l_function","target":"tensor_cast::add_rms_norm","args":[{"node":"all_reduce_1"},{"node":"residual"}'
    ',{"node":"gain"},1e-06],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"o'
    'utput","op":"output","target":"","args":[{"node":"add_rms_norm"}]}]}],"ranks":[{"graph":0,"constants'
    '":{"rank":0,"dp":[0],"tp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[1],"tp":[0,1]}}],"seed":0,"'
    'labels":["layers=3","flat","two-groups","reordered","extra-outputs","near-miss","attention","bias","'
    'carried-residual","fused-reduce","fused-residual","mlp","over-dp","over-tp","region","rms_norm","swa'
    'pped","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
