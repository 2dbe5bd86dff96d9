"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   gain: [2] = input
#   v: [2, 2] = input
#   v_1: [2, 2] = input
#   all_reduce: [2, 2] = all_reduce(v, 0, [0, 1])
#   add_rms_norm2 = add_rms_norm2(v_1, all_reduce, gain, 1e-06)
#   getitem: [2, 2] = add_rms_norm2[1]
#   return getitem

PASS = 'tests.mutants.sequence_parallel:LocalResidualReturned'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"dp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"gain","shape":[2],"dtype":"float32","placements":[],"recipe":{"kind":"unifor'
    'm","scale":1.0}},{"name":"v","shape":[2,2],"dtype":"float32","placements":[["dp","partial(sum)"]],"r'
    'ecipe":{"kind":"uniform","scale":1.0}},{"name":"v_1","shape":[2,2],"dtype":"float32","placements":[]'
    ',"recipe":{"kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"gain","op":"placeholder","ta'
    'rget":"","args":[],"val":{"shape":[2],"stride":[1],"dtype":"float32","alias":0}},{"name":"v","op":"p'
    'laceholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},'
    '{"name":"v_1","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"'
    'float32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","a'
    'rgs":[{"node":"v"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[2,2],"stride":[2'
    ',1],"dtype":"float32","alias":3}},{"name":"add_rms_norm2","op":"call_function","target":"tensor_cast'
    '::add_rms_norm2","args":[{"node":"v_1"},{"node":"all_reduce"},{"node":"gain"},1e-06],"val":{"tuple":'
    '[{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":4},{"shape":[2,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":5}]}},{"name":"getitem","op":"call_function","target":"python::getitem","args":[{"no'
    'de":"add_rms_norm2"},1],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":5}},{"name":"o'
    'utput","op":"output","target":"","args":[{"node":"getitem"}]}]}],"ranks":[{"graph":0,"constants":{"r'
    'ank":0,"dp":[0,1]}},{"graph":0,"constants":{"rank":1,"dp":[0,1]}}],"seed":0,"labels":["layers=2","sb'
    'h","bf16","mixed-dtypes","two-groups","reordered","extra-outputs","attention","bias","carried-residu'
    'al","entry-norm","fused-residual","mlp","over-dp","over-tp","reduced-read-later","region","rms_norm"'
    ',"transpose","view"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
