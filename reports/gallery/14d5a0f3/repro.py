"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [1, 2] = input
#   clone: [1, 2] = clone(v, memory_format=contiguous_format)
#   add_rms_norm2 = add_rms_norm2(v, v, gain, 1e-06)
#   getitem: [1, 2] = add_rms_norm2[0]
#   all_reduce: [1, 2] = all_reduce(getitem, 0, [0, 1])
#   return (all_reduce, clone)

PASS = 'tests.mutants.multistream:TupleDependencyUntracked'
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
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","target":"","args":[],"val"'
    ':{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"placeholder","target":"",'
    '"args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"clone","op":"ca'
    'll_function","target":"aten::clone","args":[{"node":"v"}],"kwargs":{"memory_format":{"memory_format"'
    ':"contiguous_format"}},"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":2},"meta":{"cos'
    't_s":1e-06}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_cast::add_rms_norm2","arg'
    's":[{"node":"v"},{"node":"v"},{"node":"gain"},1e-06],"val":{"tuple":[{"shape":[1,2],"stride":[2,1],"'
    'dtype":"float32","alias":3},{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4}]},"meta":{"co'
    'st_s":1e-06}},{"name":"getitem","op":"call_function","target":"python::getitem","args":[{"node":"add'
    '_rms_norm2"},0],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1e'
    '-06}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"'
    'getitem"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtyp'
    'e":"float32","alias":5},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","target":"","args":['
    '{"tuple":[{"node":"all_reduce"},{"node":"clone"}]}]}]}],"ranks":[{"graph":0,"constants":{"rank":0,"t'
    'p":[0,1]}},{"graph":0,"constants":{"rank":1,"tp":[0,1]}}],"seed":0,"labels":["layers=0","flat","reor'
    'dered","extra-outputs","overlap","branches=2","all-reduce","binary","cat","fused-norm","fused-reduce'
    '","marker","matmul","norm","operator","transpose","unary","timed"],"streams":{"compute":[0],"comm":['
    '1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
