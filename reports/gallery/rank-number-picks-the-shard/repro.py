"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [2, 2] = input
#   v_1: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v_1, 0, [1, 0])
#   add_rms_norm2 = add_rms_norm2(all_reduce, v, gain, 1e-06)
#   getitem: [2, 2] = add_rms_norm2[0]
#   return getitem

PASS = 'tests.mutants.sequence_parallel:RankNumberPicksShard'
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
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[1,0]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}},{"name":"v_1","shape":[2,2],"dtype":"float32","placements":[["tp","partial(sum)"]]'
    ',"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","ta'
    'rget":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},'
    '{"name":"v_1","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"'
    'float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","a'
    'rgs":[{"node":"v_1"},{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[2,2],"stride":'
    '[2,1],"dtype":"float32","alias":3}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_ca'
    'st::add_rms_norm2","args":[{"node":"all_reduce"},{"node":"v"},{"node":"gain"},1e-06],"val":{"tuple":'
    '[{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4},{"shape":[2,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":5}]}},{"name":"getitem","op":"call_function","target":"python::getitem","args":[{"no'
    'de":"add_rms_norm2"},0],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4}},{"name":"o'
    'utput","op":"output","target":"","args":[{"node":"getitem"}]}]}],"ranks":[{"graph":0,"constants":{"r'
    'ank":0,"tp":[1,0]}},{"graph":0,"constants":{"rank":1,"tp":[1,0]}}],"seed":0,"labels":["layers=2","fl'
    'at","bf16","two-groups","reordered","extra-outputs","attention","carried-residual","entry-norm","fus'
    'ed-reduce","fused-residual","over-dp","over-tp","region","rms_norm","unfused-residual","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
