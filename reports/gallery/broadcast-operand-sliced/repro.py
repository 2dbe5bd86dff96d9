"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   residual: [1, 1] = input
#   v: [4, 2] = input
#   all_reduce: [4, 2] = all_reduce(v, 0, [0, 1])
#   add: [4, 2] = add.Tensor(all_reduce, residual)
#   rms_norm: [4, 2] = rms_norm(add, gain, 1e-06)
#   return rms_norm

PASS = 'tests.mutants.sequence_parallel:BroadcastAddendSliced'
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
KIND = 'rewritten-raises'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"residual","shape":[1,1],"dtype":"float32","placements":[],"recipe":{"kind"'
    ':"uniform","scale":1.0}},{"name":"v","shape":[4,2],"dtype":"float32","placements":[],"recipe":{"kind'
    '":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":'
    '[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"residual","op":"placeholde'
    'r","target":"","args":[],"val":{"shape":[1,1],"stride":[1,1],"dtype":"float32","alias":1}},{"name":"'
    'v","op":"placeholder","target":"","args":[],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float32","a'
    'lias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"nod'
    'e":"v"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[4,2],"stride":[2,1],"dtype"'
    ':"float32","alias":3}},{"name":"add","op":"call_function","target":"aten::add.Tensor","args":[{"node'
    '":"all_reduce"},{"node":"residual"}],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":4'
    '}},{"name":"rms_norm","op":"call_function","target":"tensor_cast::rms_norm","args":[{"node":"add"},{'
    '"node":"gain"},1e-06],"val":{"shape":[4,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"out'
    'put","op":"output","target":"","args":[{"node":"rms_norm"}]}]}],"ranks":[{"graph":0,"constants":{"ra'
    'nk":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=2","fla'
    't","bf16","two-groups","reordered","extra-outputs","near-miss","attention","broadcast-addend","entry'
    '-norm","other-view","over-dp","reduced-twice","rms_norm","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
